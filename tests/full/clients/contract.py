"""Each request field of OpenAI's and Anthropic's own descriptions, tried on a server with values made by Schemathesis.

OpenAI's description is `openapi.json` of github.com/openai/openai-openapi: build/clients/openai-openapi.json, or where
`OPENAI_DESCRIPTION` says. Anthropic's is in the types of its Python client, which `make clients` installs.
"""

import json
import os
import re
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator

from tests.full.clients.clients import INSTALLED

OPENAI = Path(os.environ.get("OPENAI_DESCRIPTION", INSTALLED / "openai-openapi.json"))
ANTHROPIC = INSTALLED / "python" / "bin" / "python"
COMPONENTS = "#/components/schemas/"
ANTHROPIC_SCHEMAS = f"""
import json
from anthropic.types import message_count_tokens_params, message_create_params
from pydantic import TypeAdapter
kinds = message_create_params.MessageCreateParamsNonStreaming, message_count_tokens_params.MessageCountTokensParams
print(json.dumps([TypeAdapter(kind).json_schema(ref_template="{COMPONENTS}{{model}}") for kind in kinds]))
"""
EXAMPLES = 20  # values of each field
SECONDS = 60
MESSAGES = [{"role": "user", "content": "a"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
# Fields without which another field is refused, as the descriptions say in words only.
COMPANIONS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS},
}


@dataclass(frozen=True)
class Operation:
    """A request of another API that this server serves.

    Attributes:
        path: the path here.
        least: the fields of a request that is accepted.
        properties: the schema of each field.
        schemas: what the schemas of fields refer to.
        response: the schema of a response; None if the description has none.
        model: the key of `MODELS` of the model that serves it.
    """

    path: str
    least: Mapping[str, Any]
    properties: Mapping[str, Any]
    schemas: Mapping[str, Any]
    response: Any = None
    model: str = "decoder"


@dataclass(frozen=True)
class Found:
    """The outcome of a field: how many of its values were accepted and refused, and what should not have happened."""

    read: bool
    accepted: int
    refused: int
    wrong: tuple[str, ...]

    @property
    def cell(self) -> str:
        """The outcome in a word or two."""
        if self.wrong:
            return "WRONG"
        if not self.accepted:
            return "refused"
        kind = "honoured" if self.read else "ignored"
        return f"{kind}, some values refused" if self.refused else kind


def operations() -> list[Operation]:
    """Return the operations whose descriptions are there."""
    return [*(_openai(json.loads(OPENAI.read_text())) if OPENAI.is_file() else ()), *_anthropic()]


def _openai(description: Mapping[str, Any]) -> Iterator[Operation]:
    schemas = description["components"]["schemas"]
    least: dict[str, tuple[dict[str, Any], str]] = {
        "/completions": ({"prompt": "a", "max_tokens": 2}, "decoder"),
        "/chat/completions": ({"messages": MESSAGES, "max_tokens": 2}, "decoder"),
        "/responses": ({"input": "a", "max_output_tokens": 2}, "decoder"),
        "/embeddings": ({"input": "a"}, "encoder"),
    }
    for path, (fields, model) in least.items():
        operation = description["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        response = operation["responses"]["200"]["content"]["application/json"]["schema"]
        yield Operation(f"/v1{path}", fields, dict(_properties(body, schemas)), schemas, response, model)


def _anthropic() -> Iterator[Operation]:
    if not ANTHROPIC.is_file():
        return
    made = subprocess.run([ANTHROPIC, "-c", ANTHROPIC_SCHEMAS], capture_output=True, text=True, check=True)
    for path, schema in zip(("/v1/messages", "/v1/messages/count_tokens"), json.loads(made.stdout), strict=True):
        least = {"messages": MESSAGES} | ({"max_tokens": 2} if path == "/v1/messages" else {})
        yield Operation(path, least, schema["properties"], schema["$defs"])


def _properties(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the properties of a body, which may be put together from several schemas."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].removeprefix(COMPONENTS)]
    for part in schema.get("allOf", ()):
        yield from _properties(part, schemas)
    yield from schema.get("properties", {}).items()


def tried(operation: Operation, base: str, model: str) -> dict[str, Found]:
    """Send each field of an operation to the server at `base` with several values, and return the outcomes."""
    with requests.Session() as client:
        ours = client.get(f"{base}/openapi.json", timeout=SECONDS).json()
        body = ours["paths"][operation.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        read = dict(_properties(body, ours["components"]["schemas"]))
        found = {}
        for name in operation.properties:
            if name != "model":
                found[name] = _try_field(operation, name, client, base, model, name in read)
        return found


def _try_field(operation: Operation, name: str, client: requests.Session, base: str, model: str, read: bool) -> Found:
    # The least request, which is sent with every other field, has an accepted value of its own fields.
    accepted, refused, wrong = int(name in operation.least), 0, []
    companions = COMPANIONS.get(name, {}) if "chat" in operation.path or name == "stream_options" else {}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=_field_strategy(operation, name))
    def send(case: Any) -> None:
        nonlocal accepted, refused
        fields = {"model": model, **operation.least, **companions, name: case.body[name]}
        response = client.post(f"{base}{operation.path}", json=fields, timeout=SECONDS)
        problem = _problem(response, operation, name)
        if problem:
            wrong.append(f"{json.dumps(case.body[name])[:200]}: {problem}")
        accepted += response.status_code == 200
        refused += response.status_code == 400

    send()
    return Found(read, accepted, refused, tuple(wrong))


def _field_strategy(operation: Operation, name: str) -> Any:
    schema = operation.properties[name]
    body = {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
    description = {
        "openapi": "3.1.0",
        "info": {"title": name, "version": "1"},
        "paths": {
            operation.path: {
                "post": {
                    "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                    "responses": {"200": {"description": ""}},
                }
            }
        },
        "components": {"schemas": _reachable(schema, operation.schemas)},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return schemathesis.openapi.from_dict(description)[operation.path]["post"].as_strategy()


def _reachable(schema: Any, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas to which a schema refers, and those to which they refer, without their prose."""
    found: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        for name in re.findall(rf'"{COMPONENTS}([^"]+)"', json.dumps(waiting.pop())):
            if name not in found:
                found[name] = schemas[name]
                waiting.append(schemas[name])
    return found


def _problem(response: requests.Response, operation: Operation, name: str) -> str:
    """Return what is wrong with a response to a request of the description, or ""."""
    if response.status_code == 400:
        error = response.json()["error"]
        named = error.get("param") == name or re.search(rf"\b{name}\b", error["message"])
        named = named or "maximum context length" in error["message"]  # several fields together are too long
        return "" if named else f"400 that does not name the field: {error['message']}"
    if response.status_code != 200:
        return f"{response.status_code}: {response.text[:200]}"
    # The description of embeddings has numbers only, though its encoding_format may be base64.
    encoded = json.loads(response.request.body or "{}").get("encoding_format") == "base64"
    if operation.response is None or encoded or "text/event-stream" in response.headers["content-type"]:
        return ""
    schema = {**operation.response, "components": {"schemas": operation.schemas}}
    error = next(Draft202012Validator(schema).iter_errors(response.json()), None)
    return "" if error is None else f"no response of the description: {error.json_path}: {error.message[:200]}"
