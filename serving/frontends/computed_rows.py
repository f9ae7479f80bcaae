"""The rows that the engine computes for a request of a model without a cache."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.serving.api.errors import UnavailableError
from sharp.serving.api.events import ComputedRows, Finished, FinishReason
from sharp.serving.frontends.service import EventStream

CUT_SHORT = "the server ended or the request was aborted before it was done; ask again"
RETRY_SECONDS = 1.0  # the Retry-After of `CUT_SHORT`; another server may take the request at once


async def computed_rows(stream: EventStream[Any]) -> tuple[NDArray[np.float32], Finished]:
    """Return the rows of a stream, float32 [rows, ...], and the event that ends the request.

    Raises:
        UnavailableError: the server ended, or the request was aborted, before it was done.
        SharpError: the request failed.
    """
    values = None
    async for event in stream:
        if isinstance(event, ComputedRows):
            values = event.values
        elif isinstance(event, Finished):
            if event.reason is FinishReason.CANCELLED:
                raise UnavailableError(CUT_SHORT, RETRY_SECONDS)
            assert values is not None
            return values, event
    raise RuntimeError("the engine lost a request")
