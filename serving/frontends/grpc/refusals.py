"""`RefusalInterceptor`: tells `abort` which call it ends, so that refused calls are counted."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from sharp.serving.observability.refusals import CURRENT, Refusable, Refusals

KSERVE = "/inference."


class RefusalInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that lets refusals of a call be counted in metrics. It comes before all other interceptors.

    It makes the call the current request (`CURRENT`) of its task, to which `note_reason` adds the reason.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Make the call the current request of its task (`CURRENT`), and return the call's handler unchanged."""
        kserve = str(handler_call_details.method).startswith(KSERVE)
        CURRENT.set(Refusable(self._refusals, "kserve-grpc" if kserve else "grpc"))
        return await continuation(handler_call_details)
