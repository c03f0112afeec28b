"""Reading the status of a call that must fail."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2


async def status_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str, str]:
    """Return code, machine-readable reason and details of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    reason = ""
    for key, value in caught.value.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            info = error_details_pb2.ErrorInfo()
            status_pb2.Status.FromString(value).details[0].Unpack(info)
            reason = info.reason
    return caught.value.code(), reason, caught.value.details() or ""
