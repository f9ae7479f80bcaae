"""The ASGI application: OpenAI's API, `/metrics`, `/health`, and a page to look at."""

import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sharp.serving.api.errors import SERVER_FAILED, InputError, SharpError
from sharp.serving.frontends.buffers import most_request_bytes
from sharp.serving.frontends.http.authentication import TokenMiddleware
from sharp.serving.frontends.http.errors import error_body, error_response
from sharp.serving.frontends.http.generation import Endpoint, Generation
from sharp.serving.frontends.http.live import PAGE, PAGE_HEADERS, LiveState
from sharp.serving.frontends.http.openai_request import ChatRequest, CompletionRequest
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.http.tokenization import DetokenizeRequest, TokenizeRequest, TokenizerRequest, tokenization
from sharp.serving.frontends.http.unknown_fields import UnknownFields
from sharp.serving.observability.metrics import Metrics
from sharp.serving.server.running import RunningModel
from sharp.serving.server.tokens import Tokens
from sharp.serving.server.version import sharp_version


def make_app(running: RunningModel, metrics: Metrics, max_body_bytes: int, tokens: Tokens | None = None) -> Starlette:
    """The application of a model, with the metrics of the whole server; `tokens` is None without authentication."""
    service, template = running.service, running.template
    max_body_bytes = most_request_bytes(service.model.context_limit, max_body_bytes)
    live = LiveState(running.model, metrics, running.metrics)
    name = service.model.manifest.name
    fields = UnknownFields(running.api.unknown_fields)
    endpoint = Endpoint(service, template, TokenTexts(service.model.tokenizer), fields, max_body_bytes)
    entry = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sharp",
        "max_model_len": service.model.context_limit,
    }

    def state(_request: Request) -> Response:  # in a thread, too
        return JSONResponse(live.read(), headers={"Cache-Control": "no-store"})

    async def page(_request: Request) -> Response:
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    def health(path: str, check: Callable[[], Awaitable[None]]) -> Route:
        async def respond(_request: Request) -> Response:
            try:
                await check()
            except SharpError as error:
                return JSONResponse({"status": "unavailable", "reason": str(error)}, 503)
            return JSONResponse({"status": "ok"})

        return Route(path, respond)

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["model"])
        return JSONResponse(entry)

    async def version(_request: Request) -> Response:
        return JSONResponse({"version": sharp_version()})

    async def failed(_request: Request, error: Exception) -> Response:
        # Of what is no SharpError Starlette says more in the log.
        return error_response(error if isinstance(error, SharpError) else SharpError(SERVER_FAILED))

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        sentence = f"there is no {request.method} {request.url.path} here"
        return JSONResponse(error_body(InputError(sentence))[1], status, getattr(error, "headers", None))

    def generation(path: str, kind: type[CompletionRequest] | type[ChatRequest]) -> Route:
        return Route(path, Generation(endpoint, kind), methods=["POST"])

    def question(path: str, kind: type[TokenizerRequest]) -> Route:
        return Route(path, tokenization(endpoint, kind), methods=["POST"])

    return Starlette(
        routes=[
            generation("/v1/completions", CompletionRequest),
            generation("/v1/chat/completions", ChatRequest),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            question("/tokenize", TokenizeRequest),
            question("/detokenize", DetokenizeRequest),
            Route("/version", version),
            metrics_route(metrics),
            health("/health", service.health.check_ready),
            health("/health/ready", service.health.check_ready),
            health("/health/live", service.health.check_live),
            Route("/", page),
            Route("/live", state),
        ],
        exception_handlers={SharpError: failed, HTTPException: unknown, Exception: failed},
        middleware=[] if tokens is None else [Middleware(TokenMiddleware, tokens=tokens)],
    )


def metrics_route(metrics: Metrics) -> Route:
    """`/metrics`."""

    def expose(request: Request) -> Response:  # not async, so it runs in a thread: it takes a while
        text, content_type = metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    return Route("/metrics", expose)
