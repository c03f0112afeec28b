"""What every RPC handler is wrapped in: errors become status codes, and a bug costs a call, not the coordinator."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
import structlog
from fedeval.wire.status import abort

from eval_kernel.errors import FedevalError, RequestInvalid

_S = TypeVar("_S")
_In = TypeVar("_In")
_Out = TypeVar("_Out")
Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[_S, _In, Context], Awaitable[_Out]]

_log = structlog.get_logger("coordinator.rpc")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def guarded(handler: Handler[_S, _In, _Out]) -> Handler[_S, _In, _Out]:
    """Wrap a handler: a ``FedevalError`` ends the call with its status, a bug with INTERNAL and a log entry."""

    @functools.wraps(handler)
    async def wrapped(self: _S, request: _In, context: Context) -> _Out:
        try:
            return await handler(self, request, context)
        except FedevalError as error:
            failure = error
        except Exception:  # noqa: BLE001 - a bug in one call must not end the coordinator; the log has the trace
            _log.exception("unexpected error in a call", call=handler.__qualname__)
            failure = FedevalError("the coordinator met an unexpected error in this call; its log has the details")
        await abort(context, failure)

    return wrapped


def required(value: str, field: str, longest: int = 200) -> str:
    """Return a text field that must be there; raises ``RequestInvalid``."""
    if not value:
        raise RequestInvalid(f"{field} is missing")
    if len(value) > longest:
        raise RequestInvalid(f"{field} has {len(value)} characters; at most {longest} are allowed")
    return value


def name(value: str, field: str) -> str:
    """Return a field that must be a name; raises ``RequestInvalid``."""
    if not _NAME.fullmatch(value):
        raise RequestInvalid(
            f"{field} {value[:100]!r} is not a name: 1 to 100 letters, digits, '.', '_' or '-', "
            f"beginning with a letter or digit"
        )
    return value
