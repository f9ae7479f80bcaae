"""Requests of up to 1 MB of every kind, each made to cost as much as possible."""

import json
import string
from collections.abc import Iterator
from typing import Any

from sharp.v1 import inference_pb2

MOST_BYTES = 1_000_000
CONTEXT = 65536
JSON = "application/json"
Request = tuple[str, bytes, dict[str, str]]  # path, body (empty for GET), headers
SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in string.ascii_lowercase}}
HOSTILE_SCHEMA = {"type": "string", "allOf": [{"pattern": f".*a{number}.*"} for number in range(20)]}


def http_requests() -> dict[str, Request]:
    """Return hostile HTTP requests, by names that say what is hostile in them."""
    found = {name: (path, _body(body), {"Content-Type": JSON}) for name, path, body in _bodies()}
    for name, (_, body, _) in found.items():
        assert len(body) <= MOST_BYTES + 1000, name
    found["a long address"] = ("/metrics?" + "&".join(f"name[]=sharp_{number}" for number in range(1500)), b"", {})
    found["every head"] = ("/metrics?attention=head", b"", {})
    found["many headers"] = ("/health", b"", {f"x-{number}": "a" * 200 for number in range(120)})
    return found


def _body(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()[: MOST_BYTES + 1000]


def _completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 4, "temperature": 0, **fields}


def _bodies() -> Iterator[tuple[str, str, Any]]:
    """Yield the name, path and body of each hostile POST request."""
    ids = [5 + number % 200 for number in range(CONTEXT - 8)]
    many = "a" * (MOST_BYTES - 200)
    for name, fields in {
        "a text of 1 MB": {"prompt": many},
        "a text that fills the context": {"prompt": "a" * (CONTEXT - 8)},
        "blanks": {"prompt": " " * (CONTEXT - 8)},
        "letters of four bytes": {"prompt": "\U0001f600" * (CONTEXT // 4 - 8)},
        "as many ids as fit": {"prompt": ids},
        "more ids than fit": {"prompt": [7] * (MOST_BYTES // 3 - 100)},
        "256 prompts": {"prompt": ["a" * 3800] * 256},
        "128 completions": {"n": 128},
        "a long prompt, repeated 16 times": {"prompt": ids, "n": 16, "echo": True, "max_tokens": 1},
        "unknown fields": {f"field{number}": number for number in range(60_000)},
        "a long name": {"b" * (MOST_BYTES - 200): 1},
        "stop strings": {"stop": ["ab" * 120] * 64},
        "logit biases": {"logit_bias": {str(number % 257): 1 for number in range(1024)}},
        "bad words": {"bad_words": ["b" * 256] * 64},
        "allowed tokens": {"allowed_token_ids": [number % 257 for number in range(65536)]},
        "a long stop string": {"stop": many},
        "a hostile schema": {"guided_json": HOSTILE_SCHEMA},
        "nested alternatives": {"guided_json": _nested(9)},
        "a big enumeration": {"guided_json": {"enum": [f"value {number}" for number in range(4000)]}},
        "repetitions": {"guided_regex": "(x{1000}){1000}"},
        "an ambiguous grammar": {"guided_grammar": 'start: s\ns: s s | "a" | "aa" | s s s\n', "max_tokens": 200},
        "64 times an ambiguous grammar": {
            "guided_grammar": 'start: s\ns: s s | "a" | "aa" | s s s | "b" s | s "b" | "ab" | "ba"\n',
            "n": 64,
            "temperature": 1,
            "max_tokens": 200,
            "logit_bias": {"256": -100},  # the end-of-text token never comes
        },
        "choices": {"guided_choice": [f"choice {number}" for number in range(1024)]},
        "structural tags": {
            "structural_tag": {
                "triggers": [str(number) for number in range(10_000)][::-1],
                "structures": [{"begin": str(number), "end": ""} for number in range(10_000)],
            }
        },
        "entropies of every token": {"n": 32, "max_tokens": 200, "stream": True, "attention_stats": "tokens"},
        "logprobs of a long prompt": {"prompt": ids, "echo": True, "logprobs": 5, "max_tokens": 1},
    }.items():
        yield name, "/v1/completions", _completion(**fields)
    yield "nested arrays", "/v1/completions", b"[" * MOST_BYTES
    yield "nested objects", "/v1/completions", b'{"prompt":' * (MOST_BYTES // 10)
    yield "a number of 1 MB", "/v1/completions", b'{"prompt": "a", "seed": ' + b"9" * (MOST_BYTES - 100) + b"}"
    yield "escapes", "/v1/completions", b'{"prompt": "' + b"\\u0000" * (MOST_BYTES // 6 - 10) + b'"}'
    yield "one name again and again", "/v1/completions", b"{" + b'"prompt": "a", ' * 60_000 + b'"n": 1}'
    yield "no UTF-8", "/v1/completions", b'{"prompt": "' + b"\xff" * (MOST_BYTES - 100) + b'"}'
    message = {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    for name, fields in {
        "a message of 1 MB": {"messages": [{"role": "user", "content": many}]},
        "20,000 messages": {"messages": [message] * 20_000},
        "20,000 parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]},
        "128 tools": {"messages": [message], "tools": [tool] * 128, "tool_choice": "required"},
        "5,000 calls": {"messages": [message, {"role": "assistant", "tool_calls": [_call(n) for n in range(5000)]}]},
        "values for the template": {
            "messages": [message],
            "chat_template_kwargs": {f"k{n}": "v" for n in range(50_000)},
        },
        "a template": {"messages": [message], "chat_template": "{{ 'a' * 10 ** 10 }}"},
    }.items():
        yield name, "/v1/chat/completions", {"max_tokens": 4, **fields}
    yield "a response to 1 MB", "/v1/responses", {"input": many, "max_output_tokens": 4}
    yield "a message to 1 MB", "/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": many}]}
    yield "a text to tokenize", "/tokenize", {"prompt": "a " * (CONTEXT * 4 - 10)}
    yield "ids to detokenize", "/detokenize", {"tokens": ids}
    yield "texts to embed", "/v1/embeddings", {"input": ["a"] * 2048}
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [many]}
    yield "a tensor of 1 MB", "/v2/models/budget/infer", {"inputs": [tensor]}
    yield "a tensor's shape", "/v2/models/budget/infer", {"inputs": [{**tensor, "shape": [2**62, 2**62], "data": []}]}
    yield "10,000 tensors", "/v2/models/budget/infer", {"inputs": [{**tensor, "data": ["a"]}] * 10_000}


def _nested(depth: int) -> dict[str, Any]:
    return {"anyOf": [_nested(depth - 1)] * 2} if depth else {"type": "string", "maxLength": 100}


def _call(number: int) -> dict[str, Any]:
    return {"id": str(number), "type": "function", "function": {"name": "f", "arguments": "{}"}}


def grpc_requests() -> dict[str, inference_pb2.GenerateRequest]:
    """Return hostile messages of `Generate`, by names that say what is hostile in them."""
    few = {"max_tokens": 4}
    return {
        "gRPC: a text of 1 MB": inference_pb2.GenerateRequest(text="a" * (MOST_BYTES - 100), stopping=few),
        "gRPC: as many ids as fit": inference_pb2.GenerateRequest(token_ids={"ids": [7] * (CONTEXT - 8)}, stopping=few),
        "gRPC: more ids than fit": inference_pb2.GenerateRequest(token_ids={"ids": [7] * 900_000}, stopping=few),
        "gRPC: stop strings": inference_pb2.GenerateRequest(
            text="a", stopping={"max_tokens": 4, "stop": ["ab"] * 100_000}
        ),
        "gRPC: a hostile schema": inference_pb2.GenerateRequest(
            text="a", stopping=few, guided={"json": json.dumps({**HOSTILE_SCHEMA, "title": "grpc"})}
        ),
    }
