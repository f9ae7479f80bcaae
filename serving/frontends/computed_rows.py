"""What the engine made of a request's rows, for models without a cache."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.serving.api.errors import UnavailableError
from sharp.serving.api.events import ComputedRows, Finished, FinishReason
from sharp.serving.frontends.service import EventStream

CUT_SHORT = "the server ended or the request was aborted before it was done; ask again"
RETRY_SECONDS = 1.0  # after that response; another server may take it at once


async def computed_rows(stream: EventStream[Any]) -> tuple[NDArray[np.float32], Finished]:
    """The rows, and the end of the request.

    Raises:
        UnavailableError: the server ended before it was done.
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
