"""The endpoints of an encoder, and what it says to those of decoders."""

import asyncio
from collections.abc import Awaitable, Callable

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.api.errors import InputError, SharpError, UnavailableError
from sharp.serving.encoder.folder import ROUTES, EncoderFolder
from sharp.serving.frontends.admission import Held
from sharp.serving.frontends.computed_rows import computed_rows
from sharp.serving.frontends.http import response_schemas as schemas
from sharp.serving.frontends.http.body import read_body
from sharp.serving.frontends.http.encoder_request import EmbeddingRequest, EncoderRequest
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.openapi import Operation
from sharp.serving.frontends.http.request_ids import request_id_of
from sharp.serving.frontends.http.score_request import RerankRequest, ScoreRequest
from sharp.serving.frontends.http.sending import send_json, until_disconnected
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


class Encoding:
    """An ASGI application for one of the endpoints. All of a request happens inside one call, as in `Generation`."""

    def __init__(self, endpoint: Endpoint, folder: EncoderFolder, kind: type[EncoderRequest]) -> None:
        self._endpoint = endpoint
        self._service = endpoint.service
        self._folder = folder
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        origin = RequestOrigin("http", dict(Request(scope).headers))
        try:
            with self._service.buffers.hold() as held:
                with refusals_logged(origin, self._endpoint.name):
                    await read_body(Request(scope, receive), self._endpoint.max_body_bytes, held)
                await until_disconnected(receive, self._respond(held, origin, scope, receive, send))
        except ClientDisconnect:
            return
        except SharpError as error:
            await error_response(error)(scope, receive, send)

    async def _respond(self, held: Held, origin: RequestOrigin, scope: Scope, receive: Receive, send: Send) -> None:
        with refusals_logged(origin, self._endpoint.name):
            request = await self._service.parsing.run(lambda: self._read(held.take()))
        request_id, own = request_id_of(scope, request.request_id)
        async with self._service.stream(origin, lambda: self._prepare(request, own)) as stream:
            try:
                values, _ = await computed_rows(stream)
            except UnavailableError as error:  # caught here: to the log it is cancelled, not failed
                await error_response(error)(scope, receive, send)
                return
            tokens = stream.request.prompt_tokens
            # Many numbers take a while to write, and the event loop serves everyone.
            body = await asyncio.to_thread(lambda: to_json(request.body(self._folder, request_id, values, tokens)))
            await send_json(body, stream.headers, send)

    def _read(self, body: bytes) -> EncoderRequest:
        request = self._endpoint.fields.parse(self._kind, body)
        self._endpoint.fields.note(request.without_effect, "has no effect here")
        self._service.check_model(request.model)
        return request

    def _prepare(self, request: EncoderRequest, request_id: str) -> EncodeRequest:
        return self._folder.prepare_encoding(request.encode_request(self._folder, request_id))


def encoder_routes(endpoint: Endpoint, folder: EncoderFolder) -> list[Route]:
    """The routes of an encoder, and one sentence for those that need a decoder."""
    kinds: dict[tuple[str, ...], type[EncoderRequest]] = {
        EMBEDDINGS: EmbeddingRequest,
        RERANK: RerankRequest,
        SCORE: ScoreRequest,
    }
    routes = [
        Route(path, Encoding(endpoint, folder, kind), methods=["POST"])
        for paths, kind in kinds.items()
        for path in paths
    ]
    return routes + refusals(
        GENERATION, f"{endpoint.name} is an encoder and generates no text; it has {ROUTES}", endpoint
    )


def decoder_refusals(endpoint: Endpoint) -> list[Route]:
    """One sentence, of a decoder, for the routes of encoders."""
    how = "serve an encoder that was exported with --cache none"
    sentence = f"{endpoint.name} is a decoder and has no embeddings or scores; {how}"
    return refusals(ENCODING, sentence, endpoint)


def refusals(paths: tuple[str, ...], sentence: str, endpoint: Endpoint) -> list[Route]:
    """Routes of models of other kinds: an error with one sentence."""

    def route() -> Callable[[Request], Awaitable[Response]]:
        async def refuse(request: Request) -> Response:
            with refusals_logged(RequestOrigin("http", dict(request.headers)), endpoint.name):
                raise InputError(sentence)

        return refuse

    return [Route(path, route(), methods=["POST"]) for path in paths]
