"""Requests that Schemathesis makes from `/openapi.json`: each has a documented response, and none fails the server."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serving.conftest import write_folder

TEMPLATE = "{% if tools %}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
EXAMPLES = 12  # examples of each operation
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = (
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/responses"),
    ("post", "/v1/messages"),
    ("post", "/v1/messages/count_tokens"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/v1/models"),
    ("get", "/tokenizer_info"),
    ("get", "/metrics"),
    ("get", "/health"),
    ("get", "/health/live"),
    ("get", "/load"),
    ("get", "/version"),
)


@pytest.fixture(scope="module")
def api(start_server, tmp_path_factory) -> Any:
    folder = write_folder(tmp_path_factory.mktemp("models") / "chatting", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    address = start_server(folder).http_address
    load_all_checks()
    return schemathesis.openapi.from_url(f"http://{address}/openapi.json")


def fields_of(api: Any, operation: Any) -> dict[str, Any]:
    """Return the schema of an operation's request body."""
    reference = operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return api.raw_schema["components"]["schemas"][reference.rpartition("/")[2]]


def chosen(body: dict[str, Any], required: set[str]) -> list[str]:
    """Return the required fields of a request and a few others.

    All fields together would always be refused.
    """
    others = sorted(set(body) - required - {"model"})
    number = len(str(body))
    return [*(required & set(body)), *{others[(number + step) % len(others)] for step in range(number % 4) if others}]


def test_every_operation_is_tried_here(api):
    assert {(operation.ok().method, operation.ok().path) for operation in api.get_all_operations()} == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((*operation, GenerationMode.POSITIVE) for operation in OPERATIONS),
        *((*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS if operation[0] == "post"),
    ],
    ids=str,
)
def test_requests_of_the_description_have_the_responses_that_it_says(api, method, path, mode):
    operation = api[path][method]
    required = set(fields_of(api, operation).get("required", ())) if method == "post" else set()

    @settings(
        max_examples=EXAMPLES if method == "post" else 1,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = {name: case.body[name] for name in chosen(case.body, required)}
        case.validate_response(case.call(timeout=30), checks=CHECKS)

    check()
