"""The body of a request."""

from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from sharp.serving.api.sampling_fields import StrictMessage, first_error
from sharp.serving.frontends.http.errors import TooLargeError

Body = TypeVar("Body", bound=StrictMessage)


async def read_body(request: Request, limit: int) -> bytes:
    """All of it.

    Raises:
        TooLargeError: it has more than `limit` bytes.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise TooLargeError(f"the body has more than {limit} bytes, the limit")
    return bytes(body)


def parse(kind: type[Body], body: bytes) -> Body:
    """The checked body of a request.

    Raises:
        FieldError: a field is missing, unknown, or of another type.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise first_error(error) from error
