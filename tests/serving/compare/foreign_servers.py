"""Small servers that speak as vLLM, llama-server, Text Generation Inference and llama-cpp-python's server do.

Their model is the formula of `tests.serving.conftest` in plain Python. Their fields are those of each program's
documentation.
"""

import json
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.serving.conftest import EOS, VOCAB

LIKELY = 4.0  # the logit of the next token; all other logits are 0
TOTAL = math.log(math.exp(LIKELY) + VOCAB - 1)


@dataclass
class Model:
    """The hashing model. Each field is an error that a reader of checkpoints can make."""

    from_position: int | None = None  # the position from which logits differ
    scale: float = 1.0  # a factor on all logits
    eos: tuple[int, ...] = (EOS,)
    shift: int = 0  # added to every token of a text
    prefix: tuple[int, ...] = ()  # tokens before every text

    def tokens(self, text: str) -> list[int]:
        parts = text.split("<eos>")
        found = list(self.prefix)
        for number, part in enumerate(parts):
            found += [EOS] * (number > 0) + [byte + self.shift for byte in part.encode()]
        return found

    def next(self, tokens: Sequence[int], bias: dict[str, float]) -> tuple[int, dict[int, float]]:
        """Return the token after `tokens`, and all log-probabilities without the bias."""
        total = sum((position + 1) * token for position, token in enumerate(tokens))
        likely = (tokens[-1] + 1 + total) % VOCAB
        if self.from_position is not None and len(tokens) >= self.from_position:
            likely = (likely + 1) % VOCAB
        scaled = LIKELY * self.scale
        log_sum = math.log(math.exp(scaled) + VOCAB - 1)
        values = dict.fromkeys(range(VOCAB), -log_sum)
        values[likely] = scaled - log_sum
        biased = {token: values[token] + bias.get(str(token), 0) for token in values}
        return max(biased, key=biased.__getitem__), values

    def generate(self, tokens: Sequence[int], most: int, bias: dict[str, float] | None = None):
        """Return generated tokens, the log-probabilities at each, and whether the last one is a stop token."""
        read, rows = list(tokens), []
        while len(rows) < most:
            token, values = self.next(read, bias or {})
            read.append(token)
            rows.append(values)
            if token in self.eos:
                return read[len(tokens) :], rows, True
        return read[len(tokens) :], rows, False


def top(values: dict[int, float], count: int, token: int) -> dict[int, float]:
    best = sorted(values, key=lambda one: -values[one])[:count]
    return {candidate: values[candidate] for candidate in dict.fromkeys((*best, token))}


def text_of(token: int) -> str:
    return "<eos>" if token == EOS else bytes([token]).decode(errors="replace")


class Refusal(Exception):
    def __init__(self, status: int, body: Any = None) -> None:
        super().__init__(status)
        self.status, self.body = status, body


class Vllm:
    """vLLM's server: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.

    It has `echo`, and writes token ids as `token_id:97`.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def respond(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "hashing", "object": "model", "owned_by": "vllm"}]}
        if path == "/tokenize":
            tokens = self.model.tokens(body["prompt"])
            return {"count": len(tokens), "max_model_len": 128, "tokens": tokens, "token_strs": None}
        if path != "/v1/completions":
            raise Refusal(404, {"detail": "Not Found"})
        if body["logprobs"] > 20:
            raise Refusal(400, {"error": {"message": "Requested sample logprobs of 100, which is greater than 20"}})
        prompt = body["prompt"] if isinstance(body["prompt"], list) else self.model.tokens(body["prompt"])
        tokens, rows, ended = self.model.generate(prompt, body["max_tokens"], body.get("logit_bias"))
        if body.get("echo"):
            before = [None, *(self.model.next(prompt[:end], {})[1] for end in range(1, len(prompt)))]
            shown, rows = [*prompt, *tokens], [*before, *rows]
        else:
            shown = tokens
        chosen = [
            None if values is None else top(values, body["logprobs"], token)
            for token, values in zip(shown, rows, strict=True)
        ]
        choice = {
            "index": 0,
            "text": "",
            "logprobs": {
                "text_offset": [0] * len(shown),
                "token_logprobs": [
                    None if row is None else row[token] for token, row in zip(shown, chosen, strict=True)
                ],
                "tokens": [f"token_id:{token}" for token in shown],
                "top_logprobs": [
                    None if row is None else {f"token_id:{token}": value for token, value in row.items()}
                    for row in chosen
                ],
            },
            "finish_reason": "stop" if ended else "length",
            "stop_reason": None,
            "token_ids": tokens,
            "prompt_token_ids": prompt,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": 0}
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}


class LlamaServer:
    """llama.cpp's server: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.

    It has no echo, and `n_probs` at `/completion`.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def respond(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "hashing.gguf", "object": "model", "owned_by": "llamacpp"}]}
        if path == "/tokenize":
            return {"tokens": self.model.tokens(body.get("content", "")) if body.get("content") else []}
        if path == "/v1/completions":
            if body.get("echo"):
                raise Refusal(500, {"error": {"code": 500, "message": "Only no echo is supported"}})
            tokens, entries, ended = self._generate(body["prompt"], body["max_tokens"], body["logprobs"], body)
            reason = "stop" if ended else "length"
            choice = {"index": 0, "text": "", "logprobs": {"content": entries}, "finish_reason": reason}
            return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": 1}}
        if path != "/completion":
            raise Refusal(404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}})
        tokens, entries, ended = self._generate(body["prompt"], body["n_predict"], body["n_probs"], body)
        kind = "eos" if ended else "limit"
        return {"content": "", "tokens": tokens, "completion_probabilities": entries, "stop": True, "stop_type": kind}

    def _generate(self, prompt: Any, most: int, count: int, body: Any):
        read = prompt if isinstance(prompt, list) else self.model.tokens(prompt)
        tokens, rows, ended = self.model.generate(read, most, body.get("logit_bias"))
        entries = []
        for token, values in zip(tokens, rows, strict=True):
            entry = {"id": token, "token": text_of(token), "bytes": [], "logprob": values[token]}
            others = [
                {"id": one, "token": text_of(one), "bytes": [], "logprob": value}
                for one, value in list(top(values, count, token).items())[:count]
            ]
            entries.append({**entry, "top_logprobs": others})
        return tokens, entries, ended


class TextGenerationInference:
    """Text Generation Inference: https://huggingface.github.io/text-generation-inference.

    It has `decoder_input_details` at `/generate`, and takes only texts.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def respond(self, path: str, body: Any) -> Any:
        if path == "/tokenize":
            if "inputs" not in body:
                raise Refusal(422, "Failed to deserialize the JSON body: missing field `inputs`")
            tokens = self.model.tokens(body["inputs"])
            return [{"id": token, "text": text_of(token), "start": 0, "stop": 1} for token in tokens]
        if path == "/v1/completions":
            if not isinstance(body["prompt"], str):
                raise Refusal(422, "Failed to deserialize the JSON body: prompt: invalid type: sequence")
            choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
            return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": 1}}
        if path != "/generate":
            raise Refusal(404)
        prompt = self.model.tokens(body["inputs"])
        tokens, rows, ended = self.model.generate(prompt, body["parameters"]["max_new_tokens"])

        def entry(token: int, values: dict[int, float] | None) -> dict[str, Any]:
            return {"id": token, "text": text_of(token), "logprob": None if values is None else values[token]}

        before = [None, *(self.model.next(prompt[:end], {})[1] for end in range(1, len(prompt)))]
        count = body["parameters"]["top_n_tokens"]
        details = {
            "finish_reason": "eos_token" if ended else "length",
            "generated_tokens": len(tokens),
            "prefill": [entry(token, row) for token, row in zip(prompt, before, strict=True)],
            "tokens": [{**entry(token, row), "special": False} for token, row in zip(tokens, rows, strict=True)],
            "top_tokens": [
                [{**entry(candidate, row), "special": False} for candidate in list(top(row, count, token))[:count]]
                for token, row in zip(tokens, rows, strict=True)
            ],
        }
        return {"generated_text": "", "details": details}


class LlamaCppPython:
    """llama-cpp-python's server: https://llama-cpp-python.readthedocs.io/en/latest/server.

    It takes only texts, but returns ids at /extras/tokenize.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def respond(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "hashing.gguf", "object": "model", "owned_by": "me"}]}
        if path == "/extras/tokenize":
            return {"tokens": self.model.tokens(body["input"])}
        if path != "/v1/completions":
            raise Refusal(404, {"detail": "Not Found"})
        if not isinstance(body["prompt"], str):
            raise Refusal(422, {"detail": "Input should be a valid string"})
        assert not body.get("echo"), "its echo is one position late"
        prompt = self.model.tokens(body["prompt"])
        tokens, rows, ended = self.model.generate(prompt, body["max_tokens"], body.get("logit_bias"))
        tops = [
            {text_of(one): value for one, value in top(row, body["logprobs"], token).items()}
            for token, row in zip(tokens, rows, strict=True)
        ]
        logprobs = {
            "tokens": [text_of(token) for token in tokens],
            "text_offset": [0] * len(tokens),
            "token_logprobs": [row[token] for token, row in zip(tokens, rows, strict=True)],
            "top_logprobs": tops,
        }
        reason = "stop" if ended else "length"
        choice = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": reason}
        return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": len(prompt)}}


@contextmanager
def serving(server: Any) -> Iterator[str]:
    """Serve `server.respond(path, body)`, and yield the URL. A response of bytes is sent unchanged."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: Any) -> None:
            headers: dict[str, str] = {}
            try:
                status, content = 200, server.respond(self.path, body)
            except Refusal as refusal:
                status, content = refusal.status, refusal.body
                headers = getattr(refusal, "headers", {})
            sent = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *arguments: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    listening.handle_error = lambda *_: None  # ignore a client that has given up
    thread = threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}"
    finally:
        listening.shutdown()
        thread.join(10)
        listening.server_close()
