"""The body of a request."""

import asyncio
import zlib
from collections.abc import Iterator

from starlette.requests import Request

from sharp.serving.api.errors import InputError, SharpError
from sharp.serving.frontends.admission import Held
from sharp.serving.frontends.http.errors import TooLargeError, UnsupportedMediaTypeError

MOST_DISCARDED = 2**24  # bytes of a refused body that are read
PIECE = 2**16  # the most bytes that are decompressed at once
# The window sizes that zlib needs for the values of Content-Encoding.
WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: Request, limit: int, held: Held) -> None:
    """Read a body into `held`, decompressed. A refused body is read and dropped, as few clients listen while they send.

    Up to 16 MiB (`MOST_DISCARDED`) are read of a refused body, and nothing of a body that is announced as larger or
    that the client sends only on request (`expect`).

    Raises:
        TooLargeError: the body has more than `limit` bytes, as sent or decompressed.
        UnsupportedMediaTypeError: the body is compressed in a way that is not supported.
        InputError: the body cannot be decompressed.
        QueueFullError: all requests together would hold too much.
        starlette.requests.ClientDisconnect: the client has gone.
    """
    stated, size, stream = request.headers.get("content-length", ""), 0, request.stream()
    too_large = TooLargeError(f"the body has more than {limit} bytes, the limit")
    expected = int(stated[:20]) if stated.isdecimal() else 0
    try:
        if expected > limit:
            raise too_large
        decoder = _decoder(request.headers.get("content-encoding", "identity").strip().lower())
        async for sent in stream:
            for part in [sent] if decoder is None else _decompressed(decoder, sent):
                size += len(part)
                if size > limit:
                    raise too_large
                held.add(part)
                if decoder is not None:
                    await asyncio.sleep(0)  # a few bytes may hold many pieces, and the loop serves all requests
        if decoder is not None and not decoder.eof:
            raise InputError("the body is compressed, and its end is missing")
    except SharpError:
        held.release()
        if expected <= MOST_DISCARDED and "expect" not in request.headers:
            async for part in stream:
                size += len(part)
                if size > MOST_DISCARDED:
                    break
        raise


def _decoder(encoding: str) -> "zlib._Decompress | None":
    """Return the decompressor of a Content-Encoding; None for an uncompressed body.

    Raises:
        UnsupportedMediaTypeError: it is neither gzip nor deflate.
    """
    if encoding in ("", "identity"):
        return None
    if encoding not in WINDOWS:
        message = f"Content-Encoding is {encoding!r:.40}; send the body as it is, or as gzip or deflate"
        raise UnsupportedMediaTypeError(message)
    return zlib.decompressobj(WINDOWS[encoding])


def _decompressed(decoder: "zlib._Decompress", sent: bytes) -> Iterator[bytes]:
    """Yield the decompressed pieces of a part of a body. A part can hold a thousand times as many bytes as it has.

    Raises:
        InputError: the part is not compressed, or goes on after the end of the compressed data.
    """
    try:
        while sent:
            if decoder.eof:
                raise InputError("the body goes on after the end of what is compressed")
            yield decoder.decompress(sent, PIECE)
            sent = decoder.unconsumed_tail or decoder.unused_data
        while not decoder.eof and (more := decoder.decompress(b"", PIECE)):
            yield more
    except zlib.error as error:
        raise InputError(f"the body cannot be decompressed: {error}") from error
