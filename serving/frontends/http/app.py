"""The ASGI application: OpenAI's API, KServe's, `/metrics`, `/health`, and the status page."""

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sharp.serving.api.errors import SERVER_FAILED, InputError, SharpError
from sharp.serving.api_config import ApiConfig
from sharp.serving.engine.served_model import Abilities
from sharp.serving.frontends.admission import most_request_bytes
from sharp.serving.frontends.http import response_schemas as schemas
from sharp.serving.frontends.http.attention import attention_route
from sharp.serving.frontends.http.authentication import TokenMiddleware
from sharp.serving.frontends.http.browsers import BrowserMiddleware
from sharp.serving.frontends.http.chat_request import ChatRequest
from sharp.serving.frontends.http.encoding import ENCODING, GENERATION, decoder_refusals, encoder_routes, refusals
from sharp.serving.frontends.http.encoding import OPERATIONS as ENCODER_OPERATIONS
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response, is_kserve, path_of
from sharp.serving.frontends.http.generation import Generation
from sharp.serving.frontends.http.kserve import KServeRoutes
from sharp.serving.frontends.http.messages_request import CountTokensRequest, MessagesRequest, messages_refusal
from sharp.serving.frontends.http.openai_request import CompletionRequest
from sharp.serving.frontends.http.openapi import OpenApi, Operation
from sharp.serving.frontends.http.operations import (
    metrics_route,
    model_routes,
    operation_routes,
    page_routes,
    tokenizer_route,
)
from sharp.serving.frontends.http.request_ids import HEADER, RequestIdMiddleware
from sharp.serving.frontends.http.responses_request import ResponsesRequest
from sharp.serving.frontends.http.status_page import LiveState
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.http.tokenization import DetokenizeRequest, TokenizeRequest, tokenization
from sharp.serving.frontends.running import RunningModel
from sharp.serving.observability.metrics import Metrics
from sharp.serving.observability.refusals import CURRENT, Refusable, Refusals
from sharp.serving.security.tokens import Tokens

__all__ = ["make_app", "metrics_route"]

GENERATION_OPERATIONS = (
    Operation(
        "/v1/completions", "post", "Completions of prompts.", CompletionRequest, schemas.COMPLETION, streams=True
    ),
    Operation(
        "/v1/chat/completions", "post", "The next message of a conversation.", ChatRequest, schemas.CHAT, streams=True
    ),
    Operation(
        "/v1/responses",
        "post",
        "The same, as OpenAI's Responses API.",
        ResponsesRequest,
        schemas.RESPONSE,
        streams=True,
    ),
    Operation(
        "/v1/messages",
        "post",
        "The same, as Anthropic's Messages API.",
        MessagesRequest,
        schemas.MESSAGE,
        streams=True,
        failure=schemas.MESSAGES_ERROR,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "post",
        "The tokens of its prompt.",
        CountTokensRequest,
        schemas.COUNT,
        failure=schemas.MESSAGES_ERROR,
    ),
)
COMMON_OPERATIONS = (
    Operation("/v1/models", "get", "The names of the model.", response=schemas.MODELS),
    Operation("/tokenize", "post", "The tokens of a text or conversation.", TokenizeRequest, schemas.TOKENS),
    Operation("/detokenize", "post", "The text of tokens.", DetokenizeRequest, schemas.PROMPT),
    Operation(
        "/tokenizer_info", "get", "What a client needs to tokenize as the model does.", response=schemas.TOKENIZER
    ),
    Operation("/metrics", "get", "Metrics for Prometheus."),
    Operation(
        "/health",
        "get",
        "Whether requests would be served now; /health/ready and /ping are the same.",
        response=schemas.HEALTH,
        failure=schemas.UNHEALTHY,
    ),
    Operation(
        "/health/live",
        "get",
        "Fails where only a restart helps.",
        response=schemas.HEALTH,
        failure=schemas.UNHEALTHY,
    ),
    Operation("/load", "get", "The number of requests that run or wait.", response=schemas.LOAD),
    Operation("/version", "get", "The version of the server.", response=schemas.VERSION),
)
LEAST_STATUS = 400
# Responses to probes are not counted, because a server that starts or drains responds 503 to every probe.
NOT_COUNTED = ("/health", "/ping", "/v2/health", "/metrics")


def make_app(
    running: RunningModel,
    metrics: Metrics,
    max_body_bytes: int,
    tokens: Tokens | None = None,
    *,
    local_names: bool = False,
) -> Starlette:
    """Return the application of a model, with the metrics of the whole server; no `tokens`: no authentication.

    With `local_names`, the application responds only under names that no public domain can have, and under the names of
    the setting `allowed_hosts`.
    """
    service, api = running.service, running.api
    max_body_bytes = most_request_bytes(service.model, max_body_bytes)
    texts = TokenTexts(service.model.tokenizer)
    endpoint = Endpoint(service, running.template, texts, service.fields, max_body_bytes, running.forms)
    of_kind, operations = routes_of_kind(endpoint, running.model.abilities)
    routes: list[BaseRoute] = [
        *of_kind,
        Route("/tokenize", tokenization(endpoint, TokenizeRequest), methods=["POST"]),
        Route("/detokenize", tokenization(endpoint, DetokenizeRequest), methods=["POST"]),
        tokenizer_route(service),
        *model_routes(service, int(time.time())),
        *KServeRoutes(endpoint).routes(),
        metrics_route(metrics),
        *operation_routes(service.health.check_ready, service.health.check_live, lambda: service.open_requests),
        *(
            (*page_routes(LiveState(running, metrics)), attention_route(endpoint, running.attention))
            if api.page
            else ()
        ),
        *OpenApi((*operations, *COMMON_OPERATIONS)).routes(docs=api.docs),
    ]
    return application(routes, api, tokens, running.metrics.refusals, local_names=local_names)


def routes_of_kind(endpoint: Endpoint, abilities: Abilities) -> tuple[list[Route], tuple[Operation, ...]]:
    """Return the routes and descriptions of this kind of model, and refusals for the routes of other kinds."""
    if abilities.generator is not None:
        return generation_routes(endpoint), GENERATION_OPERATIONS
    if abilities.encoder is not None:
        refused = refusals(GENERATION, abilities.instead, endpoint)
        return encoder_routes(endpoint, abilities.encoder) + refused, ENCODER_OPERATIONS
    return refusals((*GENERATION, *ENCODING), abilities.instead, endpoint), ()


def generation_routes(endpoint: Endpoint) -> list[Route]:
    """Return the routes of a decoder, and refusals for the routes that need an encoder."""
    return [
        Route("/v1/completions", Generation(endpoint, CompletionRequest), methods=["POST"]),
        Route("/v1/chat/completions", Generation(endpoint, ChatRequest), methods=["POST"]),
        Route("/v1/responses", Generation(endpoint, ResponsesRequest), methods=["POST"]),
        Route("/v1/messages", Generation(endpoint, MessagesRequest, messages_refusal), methods=["POST"]),
        Route(
            "/v1/messages/count_tokens",
            tokenization(endpoint, CountTokensRequest, messages_refusal),
            methods=["POST"],
        ),
        *decoder_refusals(endpoint),
    ]


def application(
    routes: list[BaseRoute],
    api: ApiConfig,
    tokens: Tokens | None,
    refusals: Refusals | None = None,
    *,
    local_names: bool = False,
) -> Starlette:
    """Return a Starlette application of these routes with the middleware that all applications of a server have.

    The middleware adds request ids, counts refusals (if `refusals` is given), checks Origin and Host, applies CORS and
    checks tokens (None: no authentication). Errors are responses in OpenAI's form.
    """
    middleware = [Middleware(RequestIdMiddleware)]
    if refusals is not None:
        middleware.append(Middleware(RefusalMiddleware, refusals=refusals))
    middleware.append(Middleware(BrowserMiddleware, origins=api.origins, hosts=api.hosts, local=local_names))
    if origins := api.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[HEADER, "retry-after"],
            )
        )
    if tokens is not None:
        middleware.append(Middleware(TokenMiddleware, tokens=tokens))
    handlers = {SharpError: _failed, HTTPException: _unknown, Exception: _failed}
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
    app.router.redirect_slashes = False  # the redirection names the host that the client wrote
    return app


class RefusalMiddleware:
    """ASGI middleware that counts responses of 400 and above by status and reason, except those to probes."""

    def __init__(self, app: ASGIApp, refusals: Refusals) -> None:
        self._app = app
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and count its response if the status is 400 or above."""
        if scope["type"] != "http" or path_of(scope).startswith(NOT_COUNTED):
            await self._app(scope, receive, send)
            return
        current = Refusable(self._refusals, "kserve-http" if is_kserve(scope) else "http")
        CURRENT.set(current)

        async def counted(message: Message) -> None:
            """Count a response whose status is a refusal, and send the message."""
            if message["type"] == "http.response.start" and message["status"] >= LEAST_STATUS:
                current.refused(str(message["status"]))
            await send(message)

        await self._app(scope, receive, counted)


async def _failed(request: Request, error: Exception) -> Response:
    """Return the response for an exception of a route; one that is no SharpError becomes an internal error."""
    # For an error that is no SharpError Starlette logs the traceback.
    return error_response(error if isinstance(error, SharpError) else SharpError(SERVER_FAILED), request.scope)


async def _unknown(request: Request, error: Exception) -> Response:
    """Return the JSON response for a path or method that does not exist, with its status."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    sentence = f"there is no {request.method} {request.url.path} here"
    body = error_response(InputError(sentence), request.scope).body
    return Response(body, status, getattr(error, "headers", None), "application/json")
