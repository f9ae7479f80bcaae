"""Routes for operators of a server: health, load, version, metrics, models and the status page."""

import gzip
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sharp.serving.api.errors import NotFoundError, QueueFullError, SharpError
from sharp.serving.frontends.admission import RETRY_SECONDS, Pool
from sharp.serving.frontends.http.status_page import PAGE, PAGE_HEADERS, LiveState
from sharp.serving.frontends.service import GenerationService
from sharp.serving.observability.metrics import Metrics
from sharp.serving.security.address import network_of
from sharp.serving.security.open_access import METRICS_OF_A_NETWORK, METRICS_THREADS
from sharp.serving.version import sharp_version

MOST_WAITING_METRICS = 256  # requests for /metrics
MOST_NAMES = 256  # of metrics that one request may list
GZIP_LEVEL = 5


def operation_routes(
    check_ready: Callable[[], Awaitable[None]], check_live: Callable[[], Awaitable[None]], load: Callable[[], int]
) -> list[Route]:
    """Return the routes of health, at the paths of several load balancers, of the load, and of the version.

    `check_ready` and `check_live` raise SharpError, which makes the response 503, if the server is not; `load` returns
    the number that `/load` shows.
    """

    def health(path: str, check: Callable[[], Awaitable[None]], methods: Sequence[str] = ("GET",)) -> Route:
        """Return a route that responds 200 if `check` succeeds, and 503 with the reason if it raises SharpError."""

        async def respond(_request: Request) -> Response:
            """Run the check, and respond with status 200 or, with the reason, 503."""
            try:
                await check()
            except SharpError as error:
                return JSONResponse({"status": "unavailable", "reason": str(error)}, 503)
            return JSONResponse({"status": "ok"})

        return Route(path, respond, methods=list(methods))

    async def server_load(_request: Request) -> Response:
        """Respond with the number that `load` returns."""
        return JSONResponse({"server_load": load()})

    async def version(_request: Request) -> Response:
        """Respond with the version of Sharp."""
        return JSONResponse({"version": sharp_version()})

    return [
        health("/health", check_ready),
        health("/health/ready", check_ready),
        health("/health/live", check_live),
        health("/ping", check_ready, ("GET", "POST")),  # the path that SageMaker probes
        Route("/load", server_load),
        Route("/version", version),
    ]


def model_routes(service: GenerationService, created: int) -> list[Route]:
    """Return the routes of `/v1/models`: one entry for each name of the model, which was loaded at `created`."""
    names = service.names
    entries = {
        name: {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "sharp",
            "root": names[0],
            "parent": None,
            "max_model_len": service.model.context_limit,
        }
        for name in names
    }

    async def models(_request: Request) -> Response:
        """Respond with the entries of all names of the model."""
        return JSONResponse({"object": "list", "data": list(entries.values())})

    async def model(request: Request) -> Response:
        """Respond with the entry of the name in the path; NotFoundError if the model has another."""
        name = request.path_params["model"]
        service.check_model(name)
        return JSONResponse(entries.get(name) or entries[names[0]])

    return [Route("/v1/models", models), Route("/v1/models/{model:path}", model)]


def page_routes(live: LiveState) -> list[Route]:
    """Return the routes of the status page and of the numbers that it shows."""

    def state(_request: Request) -> Response:  # not async, so it runs in a thread
        """Respond with the numbers of the status page as JSON; runs in a thread."""
        return JSONResponse(live.read(), headers={"Cache-Control": "no-store"})

    async def page(_request: Request) -> Response:
        """Respond with the status page."""
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    return [Route("/", page), Route("/live", state)]


def tokenizer_route(service: GenerationService) -> Route:
    """Return the route of vLLM's `/tokenizer_info`: what a client needs to tokenize as this model does."""

    async def info(_request: Request) -> Response:
        """Respond with the tokenizer's facts. NotFoundError if the model has none."""
        model = service.model
        if model.tokenizer is None:
            raise NotFoundError(f"{model.manifest.name} has no tokenizer; send token ids as prompts")
        settings, tokenizer = model.manifest.tokenizer, model.tokenizer
        ends, bos = settings.eos_token_ids, settings.bos_token_id
        return JSONResponse(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": model.context_limit,
                "vocab_size": model.manifest.vocab_size,
                "bos_token_id": bos,
                "bos_token": None if bos is None else tokenizer.names([bos])[0],
                "eos_token_id": ends[0] if ends else None,
                "eos_token": tokenizer.names(ends[:1])[0] if ends else None,
                "eos_token_ids": list(ends),
                "pad_token": tokenizer.names(ends[:1])[0] if ends else None,
                "chat_template": service.chat_template,
            }
        )

    return Route("/tokenizer_info", info)


def metrics_route(metrics: Metrics) -> Route:
    """Return the route `/metrics`: all series or those of `name[]`; per head with `attention=head`; gzip on request."""
    pool = Pool("computed", METRICS_THREADS, MOST_WAITING_METRICS)
    under_way: Counter[str] = Counter()  # by network

    async def expose(request: Request) -> Response:
        """Respond with the metrics; QueueFullError if the network already reads them too often at a time."""
        network = network_of(request.client.host if request.client else "")
        if under_way[network] >= METRICS_OF_A_NETWORK:
            text = f"{METRICS_OF_A_NETWORK} requests for /metrics from {network} wait; ask again in {RETRY_SECONDS:g} s"
            raise QueueFullError(text, RETRY_SECONDS)
        under_way[network] += 1
        try:
            return await pool.run(lambda: respond(request))
        finally:
            under_way[network] -= 1
            if not under_way[network]:
                del under_way[network]

    def respond(request: Request) -> Response:
        """Write the metrics that the query names, in the format that the client accepts; runs in a thread."""
        names = request.query_params.getlist("name[]")[:MOST_NAMES]
        per_head = request.query_params.get("attention") == "head"
        text, content_type = metrics.text(request.headers.get("accept", ""), names, per_head=per_head)
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            text, headers = gzip.compress(text, GZIP_LEVEL), {**headers, "Content-Encoding": "gzip"}
        return Response(text, headers=headers)

    return Route("/metrics", expose)
