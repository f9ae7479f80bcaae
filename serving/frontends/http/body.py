"""The body of a request."""

from starlette.requests import Request

from sharp.serving.api.errors import SharpError
from sharp.serving.frontends.admission import Held
from sharp.serving.frontends.http.errors import TooLargeError

MOST_DISCARDED = 2**24  # bytes


async def read_body(request: Request, limit: int, held: Held) -> None:
    """Read all of it into `held`. What is refused is read to its end, and not kept: few clients hear while they send.

    Raises:
        TooLargeError: it has more than `limit` bytes.
        QueueFullError: too much is held.
    """
    stated, size, stream = request.headers.get("content-length", ""), 0, request.stream()
    too_large = TooLargeError(f"the body has more than {limit} bytes, the limit")
    expected = int(stated[:20]) if stated.isdecimal() else 0
    try:
        if expected > limit:
            raise too_large
        async for part in stream:
            size += len(part)
            if size > limit:
                raise too_large
            held.add(part)
    except SharpError:
        held.release()
        if expected <= MOST_DISCARDED and "expect" not in request.headers:
            async for part in stream:
                size += len(part)
                if size > MOST_DISCARDED:
                    break
        raise
