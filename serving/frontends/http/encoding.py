"""The endpoints of an encoder, and refusals for the endpoints of other kinds of models."""

import asyncio
from collections.abc import Awaitable, Callable

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.api.errors import InputError, UnavailableError
from sharp.serving.engine.served_model import TextEncoder
from sharp.serving.frontends.admission import Held
from sharp.serving.frontends.computed_rows import computed_rows
from sharp.serving.frontends.http import response_schemas as schemas
from sharp.serving.frontends.http.encoder_request import EmbeddingRequest, EncoderRequest
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.openapi import Operation
from sharp.serving.frontends.http.origin import origin_of
from sharp.serving.frontends.http.request_application import RequestApplication
from sharp.serving.frontends.http.request_ids import request_id_of
from sharp.serving.frontends.http.score_request import RerankRequest, ScoreRequest
from sharp.serving.frontends.http.sending import send_json
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin

EMBEDDINGS = ("/v1/embeddings",)
RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE = ("/v1/score", "/score")
ENCODING = (*EMBEDDINGS, *RERANK, *SCORE)
GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
OPERATIONS = (
    Operation("/v1/embeddings", "post", "Embeddings of texts.", EmbeddingRequest, schemas.EMBEDDINGS),
    Operation("/v1/rerank", "post", "Documents by their score for a query.", RerankRequest, schemas.RANKING),
    Operation("/v1/score", "post", "Scores of pairs of texts.", ScoreRequest, schemas.SCORES),
)


class Encoding(RequestApplication):
    """The ASGI application of one path of an encoder, such as `/v1/embeddings`.

    It parses bodies as `kind`, lets the engine compute the texts, and sends the `body` that the request makes.
    """

    def __init__(self, endpoint: Endpoint, folder: TextEncoder, kind: type[EncoderRequest]) -> None:
        super().__init__(endpoint)
        self._folder = folder
        self._kind = kind

    async def _respond(self, request: Request, held: Held, origin: RequestOrigin, send: Send) -> None:
        """Read the request, compute its rows and send the response. `held` has the body."""
        with refusals_logged(origin, self._endpoint.name):
            inputs = await self._service.parsing.run(lambda: self._read(held.take()), origin.client)
        request_id, own = request_id_of(request.scope, inputs.request_id)
        async with self._service.stream(origin, lambda: self._prepare(inputs, own)) as stream:
            try:
                values, _ = await computed_rows(stream)
            except UnavailableError as error:  # caught in the block, so that the log says cancelled, not failed
                await self._refusal(error, request.scope)(request.scope, request.receive, send)
                return
            tokens = stream.request.prompt_tokens
            # Many numbers take a while to write, which would block the event loop.
            body = await asyncio.to_thread(lambda: to_json(inputs.body(self._folder, request_id, values, tokens)))
            await send_json(body, stream.headers, send)

    def _read(self, body: bytes) -> EncoderRequest:
        """Parse the body as the endpoint's request and check that its model is served."""
        request = self._endpoint.fields.parse(self._kind, body)
        self._service.check_model(request.model)
        return request

    def _prepare(self, request: EncoderRequest, request_id: str) -> EncodeRequest:
        """Return the engine's request with this id."""
        return self._folder.prepare_encoding(request.encode_request(self._folder, request_id))


def encoder_routes(endpoint: Endpoint, folder: TextEncoder) -> list[Route]:
    """Return the routes that an encoder serves: `/v1/embeddings`, `/v1/score`, `/v1/rerank`, and their other paths."""
    kinds: dict[tuple[str, ...], type[EncoderRequest]] = {
        EMBEDDINGS: EmbeddingRequest,
        RERANK: RerankRequest,
        SCORE: ScoreRequest,
    }
    return [
        Route(path, Encoding(endpoint, folder, kind), methods=["POST"])
        for paths, kind in kinds.items()
        for path in paths
    ]


def decoder_refusals(endpoint: Endpoint) -> list[Route]:
    """Return the refusals of a decoder for the routes that need an encoder."""
    how = "serve an encoder that was exported with --cache none"
    sentence = f"{endpoint.name} is a decoder and has no embeddings or scores; {how}"
    return refusals(ENCODING, sentence, endpoint)


def refusals(paths: tuple[str, ...], sentence: str, endpoint: Endpoint) -> list[Route]:
    """Return routes at `paths` that respond with an error of one sentence, because another kind of model has them."""

    def route() -> Callable[[Request], Awaitable[Response]]:
        """Return a route that refuses every request with the sentence."""

        async def refuse(request: Request) -> Response:
            """Refuse the request with the sentence, and log the refusal."""
            with refusals_logged(origin_of(request.scope), endpoint.name):
                raise InputError(sentence)

        return refuse

    return [Route(path, route(), methods=["POST"]) for path in paths]
