"""A server that can be harmed, honest clients of the server, and invariants that hold when nothing runs."""

import contextlib
import http.client
import json
import os
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from sharp.v1 import control_pb2
from tests.full.budgets.measure import processes
from tests.serving.conftest import greedy_hashing, write_folder
from tests.serving.grpc_client import Client
from tests.serving.processes import ServerProcess, server_process

PROGRAM = (sys.executable, "-m", "tests.full.faults.faulty_server")
GRACE, STALL, EXIT = 1.0, 3.0, 5.0  # seconds; the process may take GRACE + EXIT to end
OPTIONS = ("--threads", 1, "--no-kernels", "--cache-tokens", 2048, "--max-sequences", 16)
TIMES = ("--grace-seconds", GRACE, "--stall-seconds", STALL)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CLIENTS, TOKENS = 4, 30  # honest clients, half of them of each protocol
ANSWER_SECONDS = 1.0  # limit of a response of /health
WAIT_SECONDS = 30.0  # limit of a client's request, and of waiting for a condition


class Server:
    """A faulty server, with its addresses as the tests' clients need them, and the ways to harm it."""

    def __init__(self, running: ServerProcess, fault_file: Path) -> None:
        self.running, self.fault_file = running, fault_file
        self.grpc_address, self.http_address = running.grpc, running.http
        self.pid = running.process.pid

    def worker(self, name: str) -> int:
        """Return the id of the process of chat templates (`template`) or of schemas (`guide`)."""
        found = [process for process in processes(self.pid) if f"{name}_worker.py" in command_line(process)]
        assert found, f"no process of {name}s runs"
        return found[0]

    def at_step(self, name: str, steps: int) -> None:
        """Let the backend fail `steps` steps from now on, and wait until the fault is set."""
        written = self.fault_file.with_suffix(".new")
        written.write_text(f"{name} {steps}")
        written.replace(self.fault_file)
        until(lambda: not self.fault_file.exists())

    def metrics(self) -> Counter[str]:
        """Return the values of /metrics by name; the counts of requests also have the reason of their end."""
        with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=10) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        return Counter(
            {f"{sample.name} {sample.labels.get('finish_reason', '')}".strip(): sample.value for sample in samples}
        )

    def health(self) -> int:
        """Return the status of /health, which must come within a second."""
        began = time.monotonic()
        status = get(self, "/health")
        took = time.monotonic() - began
        assert took < ANSWER_SECONDS + 1, f"/health took {took:.1f} s"  # a second of slack for a busy machine
        return status


def make_model(folder: Path) -> Path:
    """Write the hashing model with a chat template, if `folder` lacks it, and return its folder."""
    model = folder / "hashing"
    if not model.exists():
        write_folder(model, hashing=1)
        (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@contextmanager
def faulty_server(folder: Path, *options: object, step_seconds: float = 0.002) -> Iterator[Server]:
    """Yield a faulty server of the hashing model, with a chat template."""
    model = make_model(folder)
    fault_file = folder / "fault"
    environment = {**os.environ, "FAULT_FILE": str(fault_file), "STEP_SECONDS": str(step_seconds)}
    with server_process(model, *OPTIONS, *TIMES, *options, command=PROGRAM, environment=environment) as running:
        yield Server(running, fault_file)


@dataclass
class Honest:
    """Honest clients that send requests while the block runs; counts right responses and keeps the errors.

    `wrong` has the responses that were wrong, and `errors` the requests that failed.
    """

    server: Server
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Honest":
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._repeat, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        done, waiting = wait(self._clients, 2 * WAIT_SECONDS)
        self._pool.shutdown(wait=not waiting)
        if error[0] is None:  # otherwise the block's own error says more
            assert not waiting, f"clients {[self._clients.index(client) for client in waiting]} wait for ever"
            for client in done:
                client.result()

    def _repeat(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
            try:
                found = (of_grpc if number % 2 else of_http)(self.server, prompt)
            except (OSError, http.client.HTTPException, grpc.RpcError, KeyError) as error:
                self.errors.append(f"{type(error).__name__}: {str(error)[:300]}")
                self._stop.wait(0.01)
                continue
            right = greedy_hashing(prompt, TOKENS)
            if found == right[: len(found)] and len(found) >= len(right) - 1:  # a final EOS is not always shown
                self.right += 1
            else:
                self.wrong.append(f"{prompt}: {found} is not {right}")


def of_grpc(server: Server, prompt: list[int]) -> list[int]:
    """Return the tokens of a request over gRPC."""
    # With retries gRPC may lose a call beyond its deadline while a server closes: github.com/grpc/grpc/issues/41036.
    client = Client(server.grpc_address, [("grpc.enable_retries", 0)])
    with client.channel:
        parts = list(client.stream(token_ids={"ids": prompt}, max_tokens=TOKENS, timeout=WAIT_SECONDS))
    assert parts[-1].HasField("finished"), "a stream ended without its end"
    if parts[-1].finished.reason not in (1, 2):  # neither at a stop nor at the length limit
        raise OSError(f"it ended with reason {parts[-1].finished.reason}")
    return [token for part in parts if part.HasField("delta") for token in part.delta.token_ids]


def of_http(server: Server, prompt: list[int]) -> list[int]:
    """Return the tokens of a request over HTTP."""
    fields = {"max_tokens": TOKENS, "temperature": 0, "logprobs": 0, "return_tokens_as_token_ids": True}
    choice = post(server, "/v1/completions", {"prompt": prompt, **fields})["choices"][0]
    return [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]


def post(server: Server, path: str, body: dict, timeout: float = WAIT_SECONDS) -> dict:
    """Post JSON, and return the JSON of the response.

    Raises:
        urllib.error.HTTPError: The server refuses the request. The error is an OSError.
    """
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{server.http_address}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


def get(server: Server, path: str) -> int:
    """Return the status of a GET request."""
    try:
        with urllib.request.urlopen(f"http://{server.http_address}{path}", timeout=WAIT_SECONDS) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def until(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Wait until the condition holds.

    Raises:
        AssertionError: The condition does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what should have happened did not"
        time.sleep(0.01)


def command_line(pid: int) -> str:
    """Return the command line of a process, or "" if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def check_idle(server: Server) -> None:
    """Check that no request runs or waits, no block is held, and no connection is left but the check's own."""
    client = Client(server.grpc_address)
    with client.channel:
        until(lambda: client.control.GetLoad(control_pb2.GetLoadRequest()) == control_pb2.GetLoadResponse())
    names = ("sharp_requests_running", "sharp_requests_waiting", "sharp_kv_cache_usage_ratio")
    until(lambda: not any(server.metrics()[name] for name in names))
    until(lambda: sum(1 for _ in Path(f"/proc/{server.pid}/fd").iterdir()) < 100)


def chat(server: Server) -> None:
    """Check that a conversation and a request with a guide are served."""
    fields = {"max_tokens": 3, "temperature": 0}
    messages = [{"role": "user", "content": "a"}]
    post(server, "/v1/chat/completions", {"messages": messages, **fields})
    pattern = f"[a-z]{{3}}|{time.monotonic_ns()}"  # a pattern that no request has compiled yet
    post(server, "/v1/completions", {"prompt": "a", "guided": {"regex": pattern}, **fields})
