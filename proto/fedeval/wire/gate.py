"""The gate of a server: every call is refused unless its RPC has a rule and its caller is one whom the rule admits.

How a caller is recognised is the ``Authenticator``'s to say. Interceptors do not see who is connected, so the gate
wraps each handler instead.
"""

from __future__ import annotations

import hmac
import inspect
import os
import pwd
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from eval_kernel.errors import FedevalError, NotPermitted
from fedeval.wire.access import ANONYMOUS, CALLER, RULES, Principal, Rule
from fedeval.wire.credentials import TOKEN_KEY, TOKEN_PREFIX
from fedeval.wire.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
#: Hears of a call that was refused, or of one that is worth a line and has ended: caller, RPC, request, outcome.
Audit = Callable[[Principal, Context, str, Rule | None, Any, FedevalError | None], None]


class Authenticator(Protocol):
    """Recognises callers."""

    def __call__(self, token: str, context: Context) -> Principal:
        """Return who shows this token over this connection, ``ANONYMOUS`` if nobody. Raises ``AccessError``."""


class LocalToken:
    """Recognises the user who runs this server by the token that is published for it; and nobody else."""

    def __init__(self) -> None:
        """Make a new token."""
        self.token = secrets.token_urlsafe(32)
        self.principal = Principal(user_name(), local=True)

    def __call__(self, token: str, context: Context) -> Principal:
        """See ``Authenticator``."""
        return self.principal if hmac.compare_digest(token.encode(), self.token.encode()) else ANONYMOUS


def user_name() -> str:
    """Return the name of the user who runs this process."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid-{os.geteuid()}"


def token_of(context: Context) -> str:
    """Return the token that a call carries, "" if none."""
    for key, value in context.invocation_metadata() or ():
        if key == TOKEN_KEY:
            text = value if isinstance(value, str) else value.decode("utf-8", "replace")
            return text.removeprefix(TOKEN_PREFIX)
    return ""


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """Give it to a server as an interceptor."""

    def __init__(self, authenticate: Authenticator, audit: Audit | None = None) -> None:
        """Admit callers as ``RULES`` say."""
        self._authenticate = authenticate
        self._audit = audit
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Return the handler of a call, guarded; ``None`` where there is none."""
        method = handler_call_details.method
        if (known := self._handlers.get(method)) is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is not None:
            handler = self._handlers[method] = self._guard(method, handler)
        return handler

    def _guard(self, method: str, handler: Any) -> Any:
        rule = RULES.get(method)
        inner, make = _parts(handler)
        generates = inspect.isasyncgenfunction(inner)

        def shown(request: Any) -> Any:
            return None if handler.request_streaming else request

        async def guarded(request: Any, context: Context) -> Any:
            caller = ANONYMOUS
            try:
                caller = self._authenticate(token_of(context), context)
                if rule is None:
                    raise NotPermitted(f"{method} has no rule that says who may call it")
                caller.check(rule, method)
            except FedevalError as error:
                refusal = error
            else:
                CALLER.set(caller)
                if generates:
                    async for response in inner(request, context):
                        await context.write(response)
                    return None
                try:
                    response = await inner(request, context)
                except grpc.aio.AbortError:
                    self._note(caller, context, method, rule, shown(request), FedevalError(context.details()))
                    raise
                self._note(caller, context, method, rule, shown(request), None)
                return response
            if self._audit is not None:
                self._audit(caller, context, method, rule, shown(request), refusal)
            return await abort(context, refusal)

        return make(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _note(
        self, caller: Principal, context: Context, method: str, rule: Rule, request: Any, error: FedevalError | None
    ) -> None:
        if rule.audit is not None and self._audit is not None:
            self._audit(caller, context, method, rule, request, error)


def _parts(handler: Any) -> tuple[Any, Any]:
    """Return a handler's function, and what makes a handler of its kind."""
    kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    name = "_".join(kind)
    return getattr(handler, name), getattr(grpc, f"{name}_rpc_method_handler")
