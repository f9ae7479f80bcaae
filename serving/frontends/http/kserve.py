"""KServe's protocol over HTTP (`/v2`), with Triton's extensions: statistics, repository, generate."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import InputError, SharpError
from sharp.serving.frontends.admission import Held
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.kserve_messages import HEADER_LENGTH, read_message, write_message
from sharp.serving.frontends.http.request_application import RequestApplication
from sharp.serving.frontends.http.sending import SSE_HEADERS, raw_headers, send_pieces
from sharp.serving.frontends.kserve.model import KServeModel
from sharp.serving.frontends.kserve.tensors import INPUT_TYPES, SAMPLING_PARAMETERS, STREAM, TEXT_INPUT, TEXT_OUTPUT
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin
from sharp.serving.version import sharp_version

EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics", "generate"]
NUMBERS = ("shape", "dims", "ns", "count", "last_inference", "inference_count", "execution_count", "max_batch_size")
READ_HERE = (TEXT_INPUT, "id", "parameters")  # fields of generate's body; all others are tensors or sampling parameters


class KServeRoutes:
    """The HTTP routes of KServe's protocol, over the model that gRPC serves, too."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.model = KServeModel(endpoint.service)

    def routes(self) -> list[Route]:
        """Return the routes of KServe's HTTP protocol below `/v2`: health, metadata, statistics, inference."""
        health, model = self.endpoint.service.health, self.model

        async def server(_request: Request) -> Response:
            """Respond with name, version and extensions of the server."""
            return JSONResponse({"name": "sharp", "version": sharp_version(), "extensions": EXTENSIONS})

        # KServe's own client reads the body; other clients read the status.
        async def live(_request: Request) -> Response:
            """Respond whether the server is alive, with status 200 or 503."""
            alive = await health.live()
            return JSONResponse({"live": alive}, 200 if alive else 503)

        async def ready(_request: Request) -> Response:
            """Respond whether the server takes requests, with status 200 or 503."""
            takes = await health.ready()
            return JSONResponse({"ready": takes}, 200 if takes else 503)

        async def index(_request: Request) -> Response:
            """Respond with the names and states of all models."""
            return JSONResponse([_plain(entry) for entry in model.repository().models])

        def of_model(path: str, respond: Callable[[], Message] | None) -> list[Route]:
            """Return the routes of a path below a model, with and without a version.

            `respond` returns the message of the response; None responds whether the model is ready.
            """

            async def route(request: Request) -> Response:
                """Respond about the model of the path, by `respond` or with its readiness; 404 for another model."""
                try:
                    model.check(request.path_params["model"], request.path_params.get("version", ""))
                except SharpError as error:
                    return error_response(error, request.scope)
                if respond is not None:
                    return JSONResponse(_plain(respond()))
                takes = await health.ready()
                return JSONResponse({"name": model.name, "ready": takes}, 200 if takes else 503)

            return [Route(f"{start}{path}", route) for start in MODEL_PATHS]

        return [
            Route("/v2", server),
            Route("/v2/health/live", live),
            Route("/v2/health/ready", ready),
            Route("/v2/repository/index", index, methods=["POST"]),
            Route("/v2/models/stats", _responds(model.statistics)),
            *of_model("/ready", None),
            *of_model("/config", lambda: model.configuration().config),
            *of_model("/stats", model.statistics),
            *of_model("", model.metadata),
            *(Route(f"{start}/infer", _Infer(self), methods=["POST"]) for start in MODEL_PATHS),
            *(Route(f"{start}/generate", _Generate(self), methods=["POST"]) for start in MODEL_PATHS),
            *(Route(f"{start}/generate_stream", _GenerateStream(self), methods=["POST"]) for start in MODEL_PATHS),
        ]


# A model's name may have slashes, as on Hugging Face, so the path with a version is tried first.
MODEL_PATHS = ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}")


def _responds(message: Callable[[], Message]) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that responds with the protobuf message of `message()` as JSON."""

    async def route(_request: Request) -> Response:
        """Respond with the message as JSON."""
        return JSONResponse(_plain(message()))

    return route


class _Infer(RequestApplication):
    """The ASGI application of KServe's path `/v2/models/MODEL/infer`."""

    protocol = "kserve-http"

    def __init__(self, routes: KServeRoutes) -> None:
        super().__init__(routes.endpoint)
        self._model = routes.model

    async def _respond(self, request: Request, held: Held, origin: RequestOrigin, send: Send) -> None:
        """Read the request, compute it and send the response. `held` has the body."""
        with refusals_logged(origin, self._endpoint.name):
            message = await self._service.parsing.run(lambda: self._read(request, held.take()), origin.client)
        await self._send(message, origin, send)

    def _read(self, request: Request, body: bytes) -> messages.ModelInferRequest:
        """Return the request's body as KServe's message, with the model and version of its path."""
        path = request.path_params
        return read_message(body, request.headers.get(HEADER_LENGTH), path["model"], path.get("version", ""))

    async def _send(self, message: messages.ModelInferRequest, origin: RequestOrigin, send: Send) -> None:
        """Run the inference and send its outputs as JSON or in binary, as the request wishes."""
        response = await self._model.infer(message, origin)
        # Many numbers take a while to write, which would block the event loop.
        body, headers = await asyncio.to_thread(write_message, message, response)
        await _send_body(send, body, headers)


class _Generate(_Infer):
    """The ASGI application of Triton's path `generate`: one JSON object in (text, parameters), one out."""

    stream = False

    def _read(self, request: Request, body: bytes) -> messages.ModelInferRequest:
        """Return a body of /generate as KServe's message. InputError if it is not valid."""
        try:
            given = json.loads(body)
            fields = {name: value for name, value in given.items() if name not in READ_HERE}
            fields |= given.get("parameters") or {}
            written = fields.pop(SAMPLING_PARAMETERS, None) or {}
            flags = {
                name: fields.pop(name)
                for name, datatype in INPUT_TYPES.items()
                if datatype == "BOOL" and name in fields
            }
            sampling = fields | (json.loads(written) if isinstance(written, str) else written)
            message = messages.ModelInferRequest(
                model_name=request.path_params["model"],
                model_version=request.path_params.get("version", ""),
                id=str(given.get("id") or ""),
            )
            for name, text in {TEXT_INPUT: given[TEXT_INPUT], SAMPLING_PARAMETERS: json.dumps(sampling)}.items():
                contents = messages.InferTensorContents(bytes_contents=[text.encode()])
                message.inputs.add(name=name, datatype="BYTES", shape=[1], contents=contents)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"the request must be a JSON object with {TEXT_INPUT!r}: {error}"[:300]) from error
        if flags.get(STREAM) and not self.stream:
            raise InputError(f"{STREAM} is true; generate responds once, send it to generate_stream")
        for name, value in {**flags, STREAM: self.stream}.items():
            if not isinstance(value, bool):
                raise InputError(f"{name} is {value!r}; it must be true or false"[:300])
            contents = messages.InferTensorContents(bool_contents=[value])
            message.inputs.add(name=name, datatype="BOOL", shape=[1], contents=contents)
        return message

    async def _send(self, message: messages.ModelInferRequest, origin: RequestOrigin, send: Send) -> None:
        """Run the inference and send its text and parameters as one JSON object."""
        body = json.dumps(_generated(message, await self._model.infer(message, origin))).encode()
        await _send_body(send, body, {"content-type": "application/json"})


class _GenerateStream(_Generate):
    """The ASGI application of Triton's path `generate_stream`: JSON in, server-sent events of outputs out."""

    stream = True

    async def _send(self, message: messages.ModelInferRequest, origin: RequestOrigin, send: Send) -> None:
        """Run the inference and send each response as a server-sent event; an error after the first is an event too."""
        started = False
        async with aclosing(self._model.responses(message, origin)) as responses:
            try:
                async for response in responses:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": raw_headers(SSE_HEADERS)})
                        started = True
                    await send_pieces(send, f"data: {json.dumps(_generated(message, response))}\n\n".encode())
            except SharpError as error:
                if not started:
                    raise
                await send_pieces(send, f"data: {json.dumps({'error': str(error)})}\n\n".encode())
        await send({"type": "http.response.body", "more_body": False})


def _generated(request: messages.ModelInferRequest, response: messages.ModelInferResponse) -> dict[str, Any]:
    """Return the JSON object of a response to /generate: text_output, other outputs and parameters."""
    body, _ = write_message(request, response)
    written = json.loads(body)
    outputs = {output["name"]: output["data"][0] for output in written["outputs"]}
    named = {name: written[name] for name in ("id", "model_name", "model_version") if name in written}
    return {**named, TEXT_OUTPUT: outputs.pop(TEXT_OUTPUT, ""), **outputs, **written["parameters"]}


async def _send_body(send: Send, body: bytes, headers: dict[str, str]) -> None:
    """Send a whole response of status 200 with these headers and its length."""
    headers = {**headers, "content-length": str(len(body))}
    await send({"type": "http.response.start", "status": 200, "headers": raw_headers(headers)})
    await send_pieces(send, body)
    await send({"type": "http.response.body", "more_body": False})


def _plain(message: Message) -> Any:
    """Return a message as JSON in which 64-bit numbers are numbers, where protobuf writes them as texts."""
    return _numbers(MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))


def _numbers(value: Any, name: str = "") -> Any:
    """Return JSON values in which the 64-bit numbers (`NUMBERS`) that protobuf writes as text are numbers.

    `name` is the key that the value has.
    """
    if isinstance(value, dict):
        return {name: _numbers(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry, name) for entry in value]
    return int(value) if name in NUMBERS and isinstance(value, str) else value
