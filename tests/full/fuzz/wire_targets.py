"""Targets for bodies and messages of requests, up to the engine's input, without sockets and without an engine."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from pydantic_core import to_json

from sharp.core.manifest import read_manifest
from sharp.kserve import grpc_service_pb2 as kserve
from sharp.serving.api.errors import InputError
from sharp.serving.api.guided import Guided
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.frontends.grpc.convert import generate_request
from sharp.serving.frontends.http.chat_request import ChatRequest
from sharp.serving.frontends.http.encoder_request import EmbeddingRequest
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.generation import Generation
from sharp.serving.frontends.http.kserve import _Generate
from sharp.serving.frontends.http.kserve_messages import read_message
from sharp.serving.frontends.http.messages_request import CountTokensRequest, MessagesRequest
from sharp.serving.frontends.http.openai_request import CompletionRequest
from sharp.serving.frontends.http.response_limit import ResponseLimit
from sharp.serving.frontends.http.responses_request import ResponsesRequest
from sharp.serving.frontends.http.score_request import RerankRequest, ScoreRequest
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.http.tokenization import DetokenizeRequest, TokenizeRequest, TokenizerRequest
from sharp.serving.frontends.kserve.own_tensors import read_tensors
from sharp.serving.frontends.kserve.text_inference import TextInference
from sharp.serving.frontends.unknown_fields import UnknownFields
from sharp.serving.observability.metrics.exposition import Family, encode
from sharp.serving.text.chat_forms import ChatForms
from sharp.serving.text.chat_template import CHATML, ChatTemplate
from sharp.serving.text.reasoning import FORMS
from sharp.serving.text.tokenizer import load_tokenizer
from sharp.v1 import inference_pb2
from tests.full.fuzz.structured import of_json, of_message, parsed
from tests.full.fuzz.targets import Target
from tests.full.fuzz.templates import InProcess
from tests.serving.conftest import write_folder

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"a": {}}}}}
MOST_PROMPTS = 4  # the most prompts of one body that are prepared
# A template that uses every part of a conversation.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for document in documents or [] %}{{ document | tojson }}{% endfor %}{{ reasoning_effort or '' }}"
    "{% for call in messages[-1].tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments | tojson }}{% endfor %}" + CHATML
)


class _NoGuides:
    """A stand-in for the compiler of guides, which runs in its own process with its own limits."""

    def compile(self, guided: Guided) -> None:
        json.dumps(repr(guided))


def model_folder(folder: Path) -> ModelFolder:
    """Return a model whose tokens are bytes."""
    path = write_folder(folder / "counting", hashing=0)
    manifest = read_manifest(path)
    guides: Any = _NoGuides()
    return ModelFolder(manifest, load_tokenizer(path, manifest), 1024, guides, 4096, {})


def endpoint_of(model: Any) -> Endpoint:
    """Return the routes' view of the model, with a template that renders in this process, so that coverage sees it."""
    template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    template.close()
    template._process = InProcess(TEMPLATE)  # type: ignore[assignment]
    service: Any = SimpleNamespace(model=model, check_model=lambda _name: None)
    forms = ChatForms(reasoning=FORMS["qwen3"])
    return Endpoint(service, template, TokenTexts(model.tokenizer), UnknownFields("warn"), 1 << 20, forms)


def generation(kind: type[Any], *bodies: dict[str, Any]) -> Callable[[Path], Target]:
    """Return the maker of the target of a route that generates."""
    seeds = [json.dumps(body).encode() for body in bodies]

    def make(folder: Path) -> Target:
        route = Generation(endpoint_of(model_folder(folder)), kind)

        def run(body: bytes) -> None:
            request, params, prompts = route._read(body)
            limit = ResponseLimit(whole=not request.stream, repeated_by=request.prompts_repeated_by)
            for prompt in prompts[:MOST_PROMPTS]:
                route._preparation(request, "id", prompt, params, limit)()

        return Target(with_response(run), seeds, of_json(*seeds))

    return make


def with_response(run: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Return `run` with every error also written as a response."""

    def checked(body: bytes) -> object:
        try:
            return run(body)
        except InputError as error:
            json.loads(bytes(error_response(error).body))
            raise

    return checked


def tokenization(kind: type[TokenizerRequest], *bodies: dict[str, Any]) -> Callable[[Path], Target]:
    """Return the maker of the target of a route that needs only the tokenizer."""
    seeds = [json.dumps(body).encode() for body in bodies]

    def make(folder: Path) -> Target:
        endpoint = endpoint_of(model_folder(folder))

        def run(body: bytes) -> None:
            request = endpoint.fields.parse(kind, body)
            to_json(request.respond(endpoint.service.model, endpoint.template))

        return Target(with_response(run), seeds, of_json(*seeds))

    return make


def encoder(_folder: Path) -> Target:
    """Return the target of an encoder's routes, up to the checks of the body.

    The first byte chooses the route.
    """
    kinds: tuple[type[Any], ...] = (EmbeddingRequest, RerankRequest, ScoreRequest)
    fields = UnknownFields("warn")
    manifest: Any = SimpleNamespace(name="encoder", classification=None)
    embedding = SimpleNamespace(size=8, matryoshka=True, matryoshka_dimensions=(4, 8), normalize=True)
    model: Any = SimpleNamespace(manifest=manifest, embedding=embedding)
    bodies: tuple[dict[str, Any], ...] = (
        {"input": ["a", "b"], "dimensions": 4, "encoding_format": "base64", "truncate_prompt_tokens": 3},
        {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True},
        {"text_1": ["a"], "text_2": ["b", "c"], "use_activation": False},
        {"input": [[1, 2], [3]], "truncation_side": "left", "user": "a"},
    )
    seeds = [bytes([48 + index % 3]) + json.dumps(body).encode() for index, body in enumerate(bodies)]
    inner = of_json(*(seed[1:] for seed in seeds))

    def run(content: bytes) -> None:
        kind = kinds[content[0] % 3 if content else 0]
        fields.parse(kind, content[1:]).encode_request(model, "id")

    return Target(with_response(run), seeds, lambda content, rng: content[:1] + inner(content[1:], rng))


def grpc_generate(folder: Path) -> Target:
    """Return the target of `GenerateRequest` of `sharp.v1`."""
    model, kind = model_folder(folder), inference_pb2.GenerateRequest
    rich = kind(text="a text", request_id="1", priority=3, cache_salt="x")
    rich.sampling.temperature, rich.sampling.top_k, rich.sampling.top_p, rich.sampling.seed = 0.5, 4, 0.9, 7
    rich.stopping.max_tokens, rich.stopping.min_tokens = 8, 1
    rich.stopping.stop.append("b")
    rich.response.logprobs, rich.response.prompt_logprobs = 2, 1
    guided = kind(text="a", guided=inference_pb2.Guided(regex="a+"))
    seeds = [message.SerializeToString() for message in (rich, kind(token_ids={"ids": [1, 2, 3]}), guided)]

    def run(content: bytes) -> None:
        message = parsed(kind, content)
        if message is not None:
            model.prepare(generate_request(message))

    return Target(run, seeds, of_message(kind))


def infer_requests() -> list[kserve.ModelInferRequest]:
    """Return good messages of KServe's protocol: with contents and raw, with text and with numbers."""
    kind = kserve.ModelInferRequest
    text = kind(model_name="counting", id="1")
    text.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    text.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        b'{"temperature": 0.5, "max_tokens": 3, "stop": ["b"]}'
    )
    text.parameters["max_tokens"].int64_param = 4
    text.outputs.add(name="text_output")
    raw = kind(model_name="counting")
    raw.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    raw.inputs.add(name="stream", datatype="BOOL", shape=[1])
    raw.inputs.add(name="return_cumulative_logprob", datatype="BOOL", shape=[1])
    raw.raw_input_contents.extend([b"\1\0\0\0a", b"\1", b"\0"])
    numbers = kind(model_name="set")
    numbers.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    raw_numbers = kind(model_name="set")
    raw_numbers.inputs.add(name="x", datatype="FP32", shape=[2, 1])
    raw_numbers.raw_input_contents.append(bytes(8))
    return [text, raw, numbers, raw_numbers]


def kserve_infer(folder: Path) -> Target:
    """Return the target of `ModelInferRequest`, for a decoder and for a model with its own tensors."""
    model, kind = model_folder(folder), kserve.ModelInferRequest
    service: Any = SimpleNamespace(model=model, fields=UnknownFields("warn"))
    statistics: Any = None
    inference = TextInference(service, statistics)

    def run(content: bytes) -> None:
        message = parsed(kind, content)
        if message is None:
            return
        with contextlib.suppress(InputError):
            read_tensors(message, ["x"])
        inference._prepare(inference.read(message, streams=True))

    return Target(run, [message.SerializeToString() for message in infer_requests()], of_message(kind))


def kserve_http(folder: Path) -> Target:
    """Return the target of the bodies of `/v2/models/M/infer` and `generate`.

    The first byte chooses the route, and the second is the length of the JSON, or 0.
    """
    model = model_folder(folder)
    service: Any = SimpleNamespace(model=model, fields=UnknownFields("warn"))
    statistics: Any = None
    inference = TextInference(service, statistics)
    routes: Any = SimpleNamespace(endpoint=SimpleNamespace(service=service), model=None)
    request: Any = SimpleNamespace(path_params={"model": "counting"}, headers={})
    generate = _Generate(routes)
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
    binary = [{**inputs[0], "parameters": {"binary_data_size": 5}}]
    del binary[0]["data"]
    numbers = [{"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [[1.5], [2]]}]
    header = json.dumps({"inputs": binary, "id": "7"}).encode()
    bodies = [
        b"\0\0"
        + json.dumps(
            {"inputs": inputs, "parameters": {"max_tokens": 2}, "outputs": [{"name": "text_output"}]}
        ).encode(),
        b"\0" + bytes([len(header)]) + header + b"\1\0\0\0a",
        b"\0\0" + json.dumps({"inputs": numbers, "parameters": {"binary_data_output": True}}).encode(),
        b"\1\0" + json.dumps({"text_input": "a", "parameters": {"temperature": 0}, "max_tokens": 3}).encode(),
        b"\1\0" + json.dumps({"text_input": "a", "sampling_parameters": '{"top_k": 2}', "stream": False}).encode(),
    ]
    inner = of_json(*(body[2:] for body in bodies))

    def run(content: bytes) -> None:
        way, length, body = content[:1], content[1:2], content[2:]
        if way == b"\1":
            message = generate._read(request, body)
        else:
            stated = str(length[0]) * (5000 if way == b"\2" else 1) if length.strip(b"\0") else None
            message = read_message(body, stated, "counting", "")
        with contextlib.suppress(InputError):
            read_tensors(message, ["x"])
        inference._prepare(inference.read(message, streams=False))

    return Target(with_response(run), bodies, lambda content, rng: content[:2] + inner(content[2:], rng))


def metrics(_folder: Path) -> Target:
    """Return the target of `/metrics`: the header `Accept`, and the names of metrics after zeros."""
    registry = CollectorRegistry()
    Counter("a_total", "A counter.", ["model"], registry=registry).labels("m").inc()
    Histogram("b_seconds", "A histogram.", registry=registry).observe(1)
    family = Family("c", "gauge", "Of each head.", "c 1\n")

    def run(content: bytes) -> None:
        accept, *names = content.decode("latin-1").split("\0")
        text, content_type = encode([registry], [family], accept, names)
        text.decode()
        content_type.encode("latin-1")

    seeds = (
        b"application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1\0a_total\0c",
        b"text/plain; version=1.0.0; escaping=allow-utf-8",
    )
    return Target(run, seeds)


CHAT: dict[str, Any] = {
    "model": "counting",
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "c"},
    ],
    "tools": [TOOL],
    "max_completion_tokens": 4,
    "temperature": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MAKERS: dict[str, Callable[[Path], Target]] = {
    "http-completions": generation(
        CompletionRequest,
        {
            "model": "counting",
            "prompt": "ab",
            "max_tokens": 3,
            "temperature": 0,
            "stop": ["x"],
            "logprobs": 2,
            "echo": True,
            "n": 2,
        },
        {"prompt": [[1, 2], [3]], "logit_bias": {"5": 1.5}, "seed": 1, "top_k": 3, "min_p": 0.1, "best_of": 2},
        {"prompt": ["a", "b"], "guided_choice": ["a"], "bad_words": ["c"], "stop_token_ids": [3], "ignore_eos": True},
        {"prompt": "a", "structured_outputs": {"json": SCHEMA}, "suffix": "", "truncate_prompt_tokens": 2},
    ),
    "http-chat": generation(
        ChatRequest,
        CHAT,
        {
            **CHAT,
            "tool_choice": {"type": "function", "function": {"name": "find"}},
            "logprobs": True,
            "top_logprobs": 2,
        },
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            "chat_template_kwargs": {"documents": []},
            "reasoning_effort": "low",
        },
        {"messages": CHAT["messages"][:1], "continue_final_message": True, "add_generation_prompt": False},
    ),
    "http-responses": generation(
        ResponsesRequest,
        {
            "input": "a",
            "instructions": "b",
            "max_output_tokens": 3,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
        },
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "1", "name": "find", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "b"},
                {"type": "reasoning", "summary": []},
            ],
            "tools": [{"type": "function", "name": "find", "parameters": SCHEMA, "strict": True}],
            "tool_choice": {"type": "function", "name": "find"},
            "include": ["message.output_text.logprobs"],
            "reasoning": {"effort": "low"},
        },
    ),
    "http-messages": generation(
        MessagesRequest,
        {"max_tokens": 3, "system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "a"}]},
        {
            "max_tokens": 3,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "find", "input": {"a": 1}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "b"}]}
                    ],
                },
            ],
            "tools": [{"name": "find", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "find", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["x"],
        },
        {"max_tokens": 2, "messages": [], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    "http-count-tokens": tokenization(
        CountTokensRequest,
        {
            "messages": [{"role": "user", "content": "a"}],
            "system": "b",
            "tools": [{"name": "f", "input_schema": SCHEMA}],
        },
    ),
    "http-tokenize": tokenization(
        TokenizeRequest,
        {"prompt": "a text", "return_token_strs": True, "add_special_tokens": False},
        {"messages": CHAT["messages"], "tools": [TOOL], "add_generation_prompt": True},
    ),
    "http-detokenize": tokenization(DetokenizeRequest, {"tokens": [1, 2, 256]}),
    "http-encoder": encoder,
    "http-metrics": metrics,
    "grpc-generate": grpc_generate,
    "kserve-infer": kserve_infer,
    "kserve-http": kserve_http,
}
