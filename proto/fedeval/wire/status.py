"""The one table between errors and gRPC status codes, both ways; the reason travels as a google.rpc.ErrorInfo."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from eval_kernel import errors

DOMAIN = "fedeval"
_DETAILS_KEY = "grpc-status-details-bin"

#: Error class -> status code; a class that is not listed takes its nearest listed ancestor's.
CODES: dict[type[errors.FedevalError], grpc.StatusCode] = {
    errors.FedevalError: grpc.StatusCode.INTERNAL,
    errors.JobError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.JobIncomplete: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CallError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownJob: grpc.StatusCode.NOT_FOUND,
    errors.NotRegistered: grpc.StatusCode.NOT_FOUND,
    errors.AccessError: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.JobKeyConflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.JournalPaused: grpc.StatusCode.UNAVAILABLE,
    errors.Unreachable: grpc.StatusCode.UNAVAILABLE,
}


def code_of(error: errors.FedevalError) -> grpc.StatusCode:
    """Return the status code an error travels under."""
    for cls in type(error).__mro__:
        if cls in CODES:
            return CODES[cls]
    return grpc.StatusCode.INTERNAL


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.FedevalError) -> NoReturn:
    """End an RPC with ``error``: its code, its one line of text, and its reason in the details."""
    code = code_of(error)
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN))
    status = status_pb2.Status(code=code.value[0], message=str(error), details=[info])
    try:
        await context.abort(code, str(error), ((_DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.AbortError as aborted:
        raise aborted from error  # for those who write down how calls end
    raise AssertionError("abort returned")


def from_rpc(error: grpc.aio.AioRpcError, address: str) -> errors.FedevalError:
    """Return the error that a failed call stands for; one without our reason is ``Unreachable`` or ``FedevalError``."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return errors.by_code(info.reason)(status.message)
    detail = error.details() or error.code().name
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return errors.Unreachable(
            f"no coordinator answers at {address} ({detail}); is `eval-coordinator serve` running there?"
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.Unreachable(f"what answers at {address} is not an eval-coordinator ({detail})")
    return errors.FedevalError(f"the coordinator at {address} failed: {error.code().name}: {detail}")
