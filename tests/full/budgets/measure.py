"""Measure what one request costs a server, and how long it delays another client's stream."""

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.full.budgets.hostile_requests import CONTEXT, Request, grpc_requests, http_requests
from tests.serving.conftest import write_folder
from tests.serving.processes import ServerProcess, server_process

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}a"
SECONDS = 60.0  # time limit of a request
TOKENS_AHEAD = 20  # tokens that the other stream reads before the request is sent
SAMPLED = 0.01  # seconds between two looks at the memory


@dataclass(frozen=True)
class Cost:
    """The cost of one request: status, bytes sent, and CPU seconds and bytes of memory of all the server's processes.

    `gap` is the longest time in seconds between two parts of the other stream. `gap_before` is the longest such time in
    `quiet_seconds` without the request.
    """

    status: str
    sent: int
    cpu_seconds: float
    memory: int
    gap: float
    gap_before: float


@contextmanager
def budget_server(folder: Path) -> Iterator[ServerProcess]:
    """Start a server of the hashing model, which computes so little that only the server's own cost shows."""
    model = write_folder(folder / "budget", hashing=1)
    manifest = json.loads((model / "sharp.json").read_text(encoding="utf-8"))
    (model / "sharp.json").write_text(
        json.dumps({**manifest, "max_context": CONTEXT, "trained_context": CONTEXT}), encoding="utf-8"
    )
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with server_process(model, "--cache-tokens", 4 * CONTEXT, "--threads", 1, "--no-kernels") as running:
        yield running


def costs(
    running: ServerProcess, names: tuple[str, ...] = (), quiet_seconds: float = 0.3
) -> Iterator[tuple[str, Cost]]:
    """Yield the name and the cost of each kind of request, or of `names` only.

    Before each request, the other stream is watched for `quiet_seconds`.
    """
    asked = {name: (partial(send, running.http, one), len(one[1])) for name, one in http_requests().items()}
    asked |= {name: (partial(generate, running.grpc, one), one.ByteSize()) for name, one in grpc_requests().items()}
    for name, (ask, sent) in asked.items():
        if not names or name in names:
            yield name, cost(running, ask, sent, quiet_seconds)


def cost(running: ServerProcess, ask: Callable[[], str], sent: int, quiet_seconds: float) -> Cost:
    """Return the cost of `ask`, which returns a status, while another client reads a stream."""
    pid = running.process.pid
    with OtherStream(running.http) as stream:
        stream.wait(TOKENS_AHEAD)
        stream.longest()
        time.sleep(quiet_seconds)
        gap_before = stream.longest()
        cpu, memory = processor_seconds(pid), resident(pid)
        with Peak(pid) as peak:
            status = ask()
            stream.wait(TOKENS_AHEAD)
        return Cost(status, sent, processor_seconds(pid) - cpu, peak.bytes - memory, stream.longest(), gap_before)


def send(address: str, request: Request) -> str:
    """Return the status of a response after it was read to its end."""
    path, body, headers = request
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
    try:
        connection.request("POST" if body else "GET", path, body or None, headers)
        response = connection.getresponse()
        response.read()
        return str(response.status)
    # the server refused before the whole request was sent
    except (http.client.HTTPException, ConnectionError) as error:
        return type(error).__name__
    finally:
        connection.close()


def generate(address: str, message: inference_pb2.GenerateRequest) -> str:
    """Return the status of a gRPC call."""
    with grpc.insecure_channel(address) as channel:
        try:
            for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(message, timeout=SECONDS):
                pass
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


class OtherStream:
    """A client that reads a stream while it is open, and records its longest wait for a part."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._parts = 0
        self._longest = 0.0
        self._last = time.perf_counter()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "OtherStream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        body = {"prompt": [5, 17], "temperature": 0, "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection(self._address, timeout=SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        while not self._ended.is_set() and response.readline():
            now = time.perf_counter()
            with self._lock:
                self._longest = max(self._longest, now - self._last)
                self._last = now
                self._parts += 1
        connection.close()

    def longest(self) -> float:
        """Return the longest wait since the last call, including the present wait."""
        with self._lock:
            found = max(self._longest, time.perf_counter() - self._last)
            self._longest = 0.0
        return found

    def wait(self, parts: int) -> None:
        """Wait until `parts` more parts of the stream have come."""
        # each part has a line of data and an empty line
        until, deadline = self._parts + 2 * parts, time.monotonic() + SECONDS
        while self._parts < until:
            assert self._thread.is_alive(), "the other stream has ended"
            assert time.monotonic() < deadline, "the other stream stands still"
            time.sleep(0.002)


class Peak:
    """The most memory that a server's processes hold inside the block, looked at every 10 ms."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.bytes = 0

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.bytes = max(self.bytes, resident(self._pid))
            if self._ended.wait(SAMPLED):
                return


def processes(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    found = [pid]
    for process in found:
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                found += map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:  # the process has ended
            continue
    return found


def resident(pid: int) -> int:
    """Return the bytes of memory of a process and its descendants.

    A child that has not yet started its own program is left out, because it shows the memory of its parent.
    """
    own = _command(pid)
    return memory_of([pid, *(child for child in processes(pid)[1:] if _command(child) != own)])


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has ended
        return b""


def memory_of(pids: Iterable[int]) -> int:
    """Return the bytes of memory of the processes that still run."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


def processor_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including those that have ended."""
    total = 0
    for process in processes(pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")
