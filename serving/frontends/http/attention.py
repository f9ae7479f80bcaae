"""`/attention`, a route of the status page: what one head does with the tokens of a request."""

import math
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from sharp.core.manifest import Manifest
from sharp.serving.api.errors import FieldError, SharpError
from sharp.serving.engine.attention_process import TokenWeights
from sharp.serving.frontends.http.body import read_body
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.origin import origin_of
from sharp.serving.frontends.http.sending import until_disconnected
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.json_fields import NULL_IS_UNSET, RequestBody, TokenIds, WholeNumber
from sharp.serving.frontends.token_attention import TokenAttention
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.text.detokenizer import INCOMPLETE
from sharp.serving.text.tokenizer import check_token_ids

MOST_ID_BYTES = 12  # a token id in JSON, with a comma and white space
BASE_BYTES = 4096  # the rest of the body


class AttentionRequest(RequestBody):
    """A head, and the tokens that it reads; `position` is that of the query, by default the last token."""

    model: Annotated[str, NULL_IS_UNSET] = ""
    tokens: TokenIds = Field(default_factory=list)
    layer: WholeNumber = 0
    head: WholeNumber = 0
    position: WholeNumber | None = None

    def check(self, manifest: Manifest, most_tokens: int) -> int:
        """Check the numbers, and return the position of the query.

        `most_tokens` is the longest text that may be read.

        Raises:
            FieldError: a number is out of range.
        """
        count = len(self.tokens)
        if not 1 <= count <= most_tokens:
            raise FieldError("tokens", f"tokens has {count} entries; the attention of 1 to {most_tokens} is computed")
        check_token_ids("tokens", self.tokens, manifest)
        position = count - 1 if self.position is None else self.position
        for name, value, end in (
            ("layer", self.layer, manifest.layers),
            ("head", self.head, manifest.q_heads),
            ("position", position, count),
        ):
            if not 0 <= value < end:
                raise FieldError(name, f"{name} is {value}; it must be 0 to {end - 1}")
        return position


def attention_route(endpoint: Endpoint, attention: TokenAttention) -> Route:
    """Return the route `/attention`."""
    service = endpoint.service
    most_bytes = BASE_BYTES + MOST_ID_BYTES * attention.most_tokens

    def read(body: bytes) -> tuple[AttentionRequest, int]:
        """Parse a request; return it and the position of the token whose attention to show."""
        request = endpoint.fields.parse(AttentionRequest, body)
        service.check_model(request.model)
        return request, request.check(service.model.manifest, attention.most_tokens)

    async def computed(request: Request, client: str) -> Response:
        """Return the response with the requested row of attention; empty if the client has gone."""
        response = Response()  # stays empty if the client has gone

        async def compute(body: bytes) -> None:
            """Compute the row of the request in `body`, and set the response."""
            nonlocal response
            parsed, position = await service.parsing.run(lambda: read(body), client)
            row = await attention.row(parsed.tokens, parsed.layer, parsed.head, position)
            shown = await service.parsing.run(lambda: to_json(described(row, parsed.tokens, endpoint.texts)), client)
            response = Response(shown, media_type="application/json", headers={"Cache-Control": "no-store"})

        with service.buffers.hold() as held:
            try:
                await read_body(request, most_bytes, held)
            except ClientDisconnect:
                return response
            await until_disconnected(request.receive, compute(held.take()))
        return response

    async def route(request: Request) -> Response:
        """Respond with the row of attention that the request asks for, or with an error."""
        origin = origin_of(request.scope)
        try:
            with refusals_logged(origin, service.model.manifest.name):
                attention.check()
                return await computed(request, origin.client)
        except SharpError as error:
            return error_response(error, request.scope)

    return Route("/attention", route, methods=["POST"])


def described(row: TokenWeights, tokens: list[int], texts: TokenTexts) -> dict[str, Any]:
    """Return the body of a response of `/attention`: token texts, weights, entropies and the sink's mass.

    `tokens` are the ids that were read. `normalized_entropy` is H / ln n, 0 for a single key.
    """
    keys = len(row.weights)
    return {
        "tokens": [_shown(texts, token) for token in tokens],
        "first": row.first,
        "weights": row.weights,
        "entropy_nats": row.entropy,
        "normalized_entropy": row.entropy / math.log(keys) if keys > 1 else 0.0,
        "sink_mass": row.sink_mass,
    }


def _shown(texts: TokenTexts, token: int) -> str:
    """Return a token's text, or its bytes, escaped as in Python, if the text is an incomplete character."""
    found = texts.of(token)
    return found.name.removeprefix("bytes:") if INCOMPLETE in found.text else found.text
