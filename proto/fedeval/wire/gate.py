"""The gate of a server: every call is refused unless its RPC has a rule and its caller is one whom the rule admits.

How a caller is recognised is the ``Authenticator``'s to say. Interceptors do not see who is connected, so the gate
wraps each handler instead.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import os
import pwd
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from eval_kernel.errors import AccessError, CertificateExpired, FedevalError, NotPermitted, RequestInvalid
from fedeval.wire.access import ANONYMOUS, CALLER, RULES, Principal, Rule
from fedeval.wire.credentials import TOKEN_KEY, TOKEN_PREFIX
from fedeval.wire.pki import Certificate, date
from fedeval.wire.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
#: Hears of a call that was refused, or of one that is worth a line and has ended: caller, RPC, request, outcome.
Audit = Callable[[Principal, Context, str, Rule | None, Any, FedevalError | None], None]


#: A call over a connection with a certificate: what ends it early, and the task that answers it.
_Running = tuple[asyncio.Future[AccessError], asyncio.Future[Any]]


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


def expired(certificate: Certificate) -> CertificateExpired:
    """Return the error of a caller whose certificate has ended."""
    return CertificateExpired(
        f"the certificate of {certificate.owner} expired on {date(certificate.expires)}; it has to join again, with a "
        "new join string"
    )


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
        self._running: dict[str, set[_Running]] = {}  # by the certificate's serial
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
        parse = handler.request_deserializer or bytes

        async def answer(request: Any, context: Context) -> Any:
            if not generates:
                return await inner(request, context)
            async for response in inner(request, context):
                await context.write(response)
            return None

        async def guarded(raw: Any, context: Context) -> Any:
            caller, request = ANONYMOUS, None
            try:
                caller = self._authenticate(token_of(context), context)
                if rule is None:
                    raise NotPermitted(f"{method} has no rule that says who may call it")
                caller.check(rule, method)
                # Only now is read what the call says: strangers get no further than their credentials.
                stream = handler.request_streaming
                request = None if stream else _parsed(parse, raw)
                CALLER.set(caller)
                response = await self._watched(caller, answer(_Stream(raw, parse) if stream else request, context))
            except grpc.aio.AbortError as aborted:
                cause = aborted.__cause__
                failure = cause if isinstance(cause, FedevalError) else FedevalError(context.details())
                self._note(caller, context, method, rule, request, failure)
                raise
            except FedevalError as error:
                failure = error
            else:
                self._note(caller, context, method, rule, request, None)
                return response
            self._note(caller, context, method, rule, request, failure)
            return await abort(context, failure)

        return make(guarded, request_deserializer=None, response_serializer=handler.response_serializer)

    def cut(self, serials: Collection[str], error: AccessError) -> None:
        """End every call over connections with these certificates: revoked, they are good for nothing any more."""
        for serial in serials:
            for end, task in self._running.pop(serial, ()):
                if not (end.done() or task.done()):  # one that has ended has been answered
                    end.set_result(error)
                    task.cancel()

    async def _watched(self, caller: Principal, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a call's end, or that of its certificate. Raises ``AccessError`` then."""
        certificate = caller.certificate
        if certificate is None or caller.local:
            return await call
        end: asyncio.Future[AccessError] = asyncio.get_running_loop().create_future()
        running = self._running.setdefault(certificate.serial, set())
        task = asyncio.ensure_future(call)
        running.add((end, task))
        try:
            left = max(certificate.expires - time.time(), 0.0)
            await asyncio.wait((task, end), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise end.result()
            if task.done():
                return task.result()
            raise expired(certificate)
        finally:
            running.discard((end, task))
            if not running and self._running.get(certificate.serial) is running:
                del self._running[certificate.serial]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _note(
        self,
        caller: Principal,
        context: Context,
        method: str,
        rule: Rule | None,
        request: Any,
        error: FedevalError | None,
    ) -> None:
        """Have a call written down that its rule says is worth it, or that was refused to this caller."""
        worth = rule is None or rule.audit is not None or isinstance(error, AccessError)
        if worth and self._audit is not None:
            self._audit(caller, context, method, rule, request, error)


class _Stream:
    """The messages of a call, parsed one by one."""

    def __init__(self, raw: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> None:
        self._raw = raw
        self._parse = parse

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Any:
        return _parsed(self._parse, await anext(self._raw))


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """Return a message. Raises ``RequestInvalid``."""
    try:
        return parse(data)
    except (ValueError, DecodeError):
        raise RequestInvalid("the message cannot be read: it is not what this call takes") from None


def _parts(handler: Any) -> tuple[Any, Any]:
    """Return a handler's function, and what makes a handler of its kind."""
    kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    name = "_".join(kind)
    return getattr(handler, name), getattr(grpc, f"{name}_rpc_method_handler")
