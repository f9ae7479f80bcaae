"""Faults of a server's process, of its machine and of its clients, and what has to hold after each of them."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from sharp.kserve import grpc_service_pb2_grpc
from sharp.v1 import control_pb2
from tests.full.budgets.measure import processes
from tests.full.faults.test_clients import KINDS
from tests.serving.conftest import greedy_hashing, write_folder
from tests.serving.grpc_client import Client
from tests.serving.processes import SERVE, ServerProcess, server_process

PROGRAM = (sys.executable, "-m", "tests.full.faults.faulty_server")
GRACE, STALL, EXIT = 1.0, 3.0, 5.0  # seconds; the process may take `EXIT` more than `GRACE`
OPTIONS = ("--threads", 1, "--no-kernels", "--cache-tokens", 2048, "--max-sequences", 16)
TIMES = ("--grace-seconds", GRACE, "--stall-seconds", STALL)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CLIENTS, TOKENS = 4, 30  # honest clients, half of them of each protocol
ANSWER_SECONDS = 1.0  # of health
WAIT_SECONDS = 30.0  # of a client, and for what has to become right again
IDLE_HTTP, IDLE_GRPC = 600, 400
IDLE_CHANNELS = 5  # of a thousand calls
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and empty settings
LONG = {"prompt": [5, 17], "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}


class Server:
    """A faulty server: its addresses as the clients of the tests want them, and how it is harmed."""

    def __init__(self, running: ServerProcess, fault_file: Path) -> None:
        self.running, self.fault_file = running, fault_file
        self.grpc_address, self.http_address = running.grpc, running.http
        self.pid = running.process.pid

    def worker(self, name: str) -> int:
        """The process of chat templates (`template`) or of schemas (`guide`)."""
        found = [one for one in processes(self.pid) if f"{name}_worker.py" in command_line(one)]
        assert found, f"no process of {name}s runs"
        return found[0]

    def at_step(self, name: str, steps: int) -> None:
        """Let the backend fail so many steps from now on, and wait until it does."""
        written = self.fault_file.with_suffix(".new")
        written.write_text(f"{name} {steps}")
        written.replace(self.fault_file)
        until(lambda: not self.fault_file.exists())

    def metrics(self) -> Counter[str]:
        """Values by name, of requests by the reason of their end."""
        with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=10) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        return Counter({f"{one.name} {one.labels.get('finish_reason', '')}".strip(): one.value for one in samples})

    def health(self) -> int:
        """The status of /health, which comes within a second."""
        began = time.monotonic()
        status = get(self, "/health")
        took = time.monotonic() - began
        assert took < ANSWER_SECONDS + 1, f"/health took {took:.1f} s"  # a second of its own, and this machine's
        return status


def make_model(folder: Path) -> Path:
    """The hashing model, with a chat template."""
    model = folder / "hashing"
    if not model.exists():
        write_folder(model, hashing=1)
        (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@contextmanager
def faulty_server(folder: Path, *options: object, step_seconds: float = 0.002) -> Iterator[Server]:
    """A server of the hashing model, with a chat template."""
    model = make_model(folder)
    fault_file = folder / "fault"
    environment = {**os.environ, "FAULT_FILE": str(fault_file), "STEP_SECONDS": str(step_seconds)}
    with server_process(model, *OPTIONS, *TIMES, *options, command=PROGRAM, environment=environment) as running:
        yield Server(running, fault_file)


@dataclass
class Honest:
    """What honest clients got while the block ran: requests that were right, and the errors of others."""

    server: Server
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Honest":
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._repeat, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.result(timeout=2 * WAIT_SECONDS)  # a client that waits for ever is told nothing
        self._pool.shutdown()

    def _repeat(self, number: int) -> None:
        draws = random.Random(number)
        while not self._stop.is_set():
            prompt = [draws.randrange(256) for _ in range(draws.randint(1, 20))]
            try:
                found = (of_grpc if number % 2 else of_http)(self.server, prompt)
            except (OSError, http.client.HTTPException, grpc.RpcError, KeyError) as error:
                self.errors.append(f"{type(error).__name__}: {str(error)[:300]}")
                self._stop.wait(0.01)
                continue
            right = greedy_hashing(prompt, TOKENS)
            if found == right[: len(found)] and len(found) >= len(right) - 1:  # EOS is not always shown
                self.right += 1
            else:
                self.wrong.append(f"{prompt}: {found} is not {right}")


def of_grpc(server: Server, prompt: list[int]) -> list[int]:
    """The tokens of a request over gRPC."""
    client = Client(server.grpc_address)
    with client.channel:
        parts = list(client.stream(token_ids={"ids": prompt}, max_tokens=TOKENS, timeout=WAIT_SECONDS))
    assert parts[-1].HasField("finished"), "a stream ended without its end"
    if parts[-1].finished.reason not in (1, 2):  # neither stopped nor at its length
        raise OSError(f"it ended with reason {parts[-1].finished.reason}")
    return [token for part in parts if part.HasField("delta") for token in part.delta.token_ids]


def of_http(server: Server, prompt: list[int]) -> list[int]:
    """The tokens of a request over HTTP."""
    fields = {"max_tokens": TOKENS, "temperature": 0, "logprobs": 0, "return_tokens_as_token_ids": True}
    choice = post(server, "/v1/completions", {"prompt": prompt, **fields})["choices"][0]
    return [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]


def post(server: Server, path: str, body: dict, timeout: float = WAIT_SECONDS) -> dict:
    """A response of JSON; an error is a `urllib.error.HTTPError`, which is an OSError."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{server.http_address}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


def get(server: Server, path: str) -> int:
    """A status."""
    try:
        with urllib.request.urlopen(f"http://{server.http_address}{path}", timeout=WAIT_SECONDS) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def until(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Wait for it.

    Raises:
        AssertionError: it did not come true.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what should have happened did not"
        time.sleep(0.01)


def command_line(pid: int) -> str:
    """Of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


# What happens to a server that then goes on.


def backend(name: str) -> Callable[[Server, random.Random], None]:
    """The backend fails at some step from now on."""
    return lambda server, draws: server.at_step(name, draws.randrange(12))


def jump(number: int) -> Callable[[Server, random.Random], None]:
    """The clock jumps, and goes on from there."""
    return lambda server, _: os.kill(server.pid, number)


def stopped(server: Server, draws: random.Random) -> None:
    """The whole process stands still."""
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(draws.uniform(0.2, 2.0))
    os.kill(server.pid, signal.SIGCONT)


def chat(server: Server) -> None:
    """A conversation and a request with a guide are served."""
    fields = {"max_tokens": 3, "temperature": 0}
    messages = [{"role": "user", "content": "a"}]
    post(server, "/v1/chat/completions", {"messages": messages, **fields})
    pattern = f"[a-z]{{3}}|{time.monotonic_ns()}"  # one that is not compiled yet
    post(server, "/v1/completions", {"prompt": "a", "guided": {"regex": pattern}, **fields})


def worker_killed(name: str) -> Callable[[Server, random.Random], None]:
    """It was killed; the next request that needs it is served."""

    def act(server: Server, _: random.Random) -> None:
        os.kill(server.worker(name), signal.SIGKILL)
        chat(server)

    return act


def worker_stopped(name: str) -> Callable[[Server, random.Random], None]:
    """It stands still: who needs it is told to come back, and then served."""

    def act(server: Server, _: random.Random) -> None:
        os.kill(server.worker(name), signal.SIGSTOP)
        try:
            chat(server)
        except urllib.error.HTTPError as error:
            assert error.code == 429 and error.headers["Retry-After"], error.code
        else:
            raise AssertionError("a process that is stopped replied")
        chat(server)

    return act


def no_descriptors(server: Server, draws: random.Random) -> None:
    """It may open eight more files and no more, while forty clients and health come."""
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    highest = max(int(one.name) for one in Path(f"/proc/{server.pid}/fd").iterdir())
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (highest + 9, limits[1]))
    try:
        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(connected(server.http_address))
            time.sleep(draws.uniform(0.1, 0.4))
            until(lambda: responds(server), 2 * ANSWER_SECONDS)
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)


def responds(server: Server) -> bool:
    """Whether health does; its connection may be the oldest that waits, and give way to another."""
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        return server.health() == 200
    return False


def full_log(server: Server, draws: random.Random) -> None:
    """The disk of its log is full."""
    limits = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, limits[1]))
    time.sleep(draws.uniform(0.1, 0.4))
    server.health()
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, limits)


def connected(address: str) -> socket.socket:
    """A connection."""
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)


def idle(server: Server, _: random.Random) -> None:
    """A thousand connections of both protocols that say nothing more."""
    with ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = IDLE_HTTP + IDLE_GRPC + 300
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(needed, hard)), hard))
        for _ in range(IDLE_HTTP):
            stack.enter_context(connected(server.http_address))
        for _ in range(IDLE_GRPC):
            stack.enter_context(connected(server.grpc_address)).sendall(HTTP2)
        server.health()
        os.kill(server.worker("template"), signal.SIGKILL)  # its successor has descriptors above 1023
        chat(server)


def idle_calls(server: Server, _: random.Random) -> None:
    """A thousand calls that are open and send nothing."""

    async def hold() -> None:
        async with AsyncExitStack() as stack:
            for number in range(IDLE_CHANNELS):
                own = [("grpc.use_local_subchannel_pool", 1), ("sharp.number", number)]
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.grpc_address, own))
                stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
                calls = [stub.ModelStreamInfer() for _ in range(1000 // IDLE_CHANNELS)]
                for call in calls:
                    stack.callback(call.cancel)
                await asyncio.gather(*(call.wait_for_connection() for call in calls))
            assert await asyncio.to_thread(server.health) == 200
            await asyncio.to_thread(chat, server)

    asyncio.run(hold())


def streams_unread(server: Server, draws: random.Random) -> None:
    """Clients that read a byte, wait, and read another."""
    body = json.dumps(LONG)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(server.http_address)) for _ in range(8)]
        for client in clients:
            client.sendall((head + body).encode())
        for _ in range(draws.randint(2, 4)):
            time.sleep(0.25)
            for client in clients:
                assert client.recv(1)


def rough(name: str) -> Callable[[Server, random.Random], None]:
    """A client that vanishes, lies or babbles."""

    def act(server: Server, _: random.Random) -> None:
        with contextlib.suppress(OSError, grpc.RpcError):  # how it ended is not its business
            KINDS[name](server)

    return act


@dataclass(frozen=True)
class ServerFault:
    """What happens; whether requests that run may end with an error of it; what /metrics must have counted then."""

    act: Callable[[Server, random.Random], None]
    may_fail: bool = False
    counted: str | None = None


FAILED = "sharp_requests_total error"
FAULTS = {
    "a step of the server raises": ServerFault(backend("raises"), True, FAILED),
    "a step of the server has no memory": ServerFault(backend("no memory"), True, FAILED),
    "a step of the server gives NaN": ServerFault(backend("NaN"), True, FAILED),
    "a step of the server takes 1.5 s": ServerFault(backend("pauses")),
    "the clock jumps an hour forward": ServerFault(jump(signal.SIGUSR1)),
    "the clock jumps two hours back": ServerFault(jump(signal.SIGUSR2)),
    "the server is stopped and continued": ServerFault(stopped),
    "the process of chat templates is killed": ServerFault(worker_killed("template")),
    "the process of schemas is killed": ServerFault(worker_killed("guide")),
    "the process of chat templates is stopped": ServerFault(worker_stopped("template")),
    "the process of schemas is stopped": ServerFault(worker_stopped("guide")),
    "descriptors are used up": ServerFault(no_descriptors, True),
    "the disk of the log is full": ServerFault(full_log),
    "1,000 idle connections": ServerFault(idle),
    "1,000 idle calls of gRPC": ServerFault(idle_calls),
    "eight streams are read a byte at a time": ServerFault(streams_unread),
    **{f"a client: {name}": ServerFault(rough(name)) for name in sorted(set(KINDS) - {"takes another's id"})},
}


def check_server_fault(server: Server, name: str, seed: int) -> None:
    """Harm a server that runs, and look at what became of it and of its honest clients.

    Raises:
        AssertionError: an invariant does not hold.
    """
    fault, draws = FAULTS[name], random.Random(f"{name} {seed}")
    before = server.metrics()
    with Honest(server) as honest:
        until(lambda: honest.right or honest.errors)
        fault.act(server, draws)
        so_far = honest.right
        if fault.counted:
            until(lambda: server.metrics()[fault.counted] > before[fault.counted])
        until(lambda: honest.right >= so_far + CLIENTS)  # it serves again
        until(lambda: server.health() == 200)
    assert honest.wrong == []
    assert fault.may_fail or not honest.errors, honest.errors[:3]
    check_idle(server)
    assert server.running.process.poll() is None


def check_idle(server: Server) -> None:
    """Nothing runs, nothing waits, no block is held, and no connection is left but ours."""
    client = Client(server.grpc_address)
    with client.channel:
        until(lambda: client.control.GetLoad(control_pb2.GetLoadRequest()) == control_pb2.GetLoadResponse())
    names = ("sharp_requests_running", "sharp_requests_waiting", "sharp_kv_cache_usage_ratio")
    until(lambda: not any(server.metrics()[name] for name in names))
    until(lambda: sum(1 for _ in Path(f"/proc/{server.pid}/fd").iterdir()) < 100)


def run_server_faults(
    folder: Path, names: list[str], times: int, report: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    """So many of each kind, on one server; how many there were, and what broke. After a break it is another server."""
    counts: Counter[str] = Counter()
    broken: list[str] = []
    left = [(name, seed) for name in names for seed in range(times)]
    while left:
        with faulty_server(folder) as server:
            chat(server)  # starts the process of schemas
            while left:
                name, seed = left.pop(0)
                try:
                    check_server_fault(server, name, seed)
                except Exception as error:
                    broken.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
                    break
                counts[name] += 1
                if seed + 1 == times:
                    report(f"{counts[name]:6} {name}")
    return counts, broken


# How a server starts and ends.


def killed(folder: Path, draws: random.Random) -> None:
    """kill -9 under load: every client is told, no process is left, and a successor serves on the same ports."""
    with faulty_server(folder) as server:
        chat(server)
        workers = processes(server.pid)[1:]
        with Honest(server) as honest:
            time.sleep(draws.uniform(0.1, 0.5))
            server.running.process.kill()
            server.running.process.wait()
            until(lambda: len(honest.errors) >= CLIENTS)
        assert honest.wrong == []
        until(lambda: not any("_worker.py" in command_line(one) for one in workers))
    ports = [
        option
        for option, at in (("--grpc-port", server.grpc_address), ("--http-port", server.http_address))
        for option in (option, at.rpartition(":")[2])
    ]
    with faulty_server(folder, *ports) as server:
        of_http(server, [1, 2, 3])


def told_to_end(folder: Path, draws: random.Random) -> None:
    """SIGTERM under load: it ends in time, and every client has its tokens or an error."""
    with faulty_server(folder) as server:
        chat(server)
        workers = processes(server.pid)[1:]
        with Honest(server) as honest:
            time.sleep(draws.uniform(0.1, 0.5))
            ends(server, signal.SIGTERM, 0)
        assert honest.wrong == [] and honest.right
        until(lambda: not any("_worker.py" in command_line(one) for one in workers))
        assert "Traceback" not in server.running.printed()


def told_to_end_while_stuck(folder: Path, draws: random.Random) -> None:
    """A step that never ends: health says so, SIGTERM ends the process in time, and every client is told."""
    with faulty_server(folder) as server:
        chat(server)
        with Honest(server) as honest:
            server.at_step("hangs", draws.randrange(5))
            until(lambda: get(server, "/health/live") == 503, 2 * STALL + WAIT_SECONDS)
            assert server.metrics()["sharp_engine_step_running_seconds"] > STALL
            ends(server, signal.SIGTERM, 124)
        assert honest.wrong == [] and honest.errors


def told_to_end_while_stopped(folder: Path, draws: random.Random) -> None:
    """SIGTERM to a process that stands still; it ends in time once it goes on."""
    with faulty_server(folder) as server, Honest(server) as honest:
        until(lambda: honest.right)
        os.kill(server.pid, signal.SIGSTOP)
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(draws.uniform(0.1, 1.0))
        ends(server, signal.SIGCONT, 0)
    assert honest.wrong == []


def told_to_end_without_descriptors(folder: Path, draws: random.Random) -> None:
    """SIGTERM while no file can be opened and the disk of the log is full."""
    with faulty_server(folder) as server, Honest(server) as honest:
        until(lambda: honest.right)
        for limit, value in ((resource.RLIMIT_NOFILE, 1), (resource.RLIMIT_FSIZE, 1)):
            resource.prlimit(server.pid, limit, (value, resource.prlimit(server.pid, limit)[1]))
        time.sleep(draws.uniform(0.1, 0.5))
        ends(server, signal.SIGTERM, 0)
    assert honest.wrong == []


def ends(server: Server, number: int, code: int) -> None:
    """A signal ends the process in time, with this exit code."""
    os.kill(server.pid, number)
    assert server.running.process.wait(GRACE + EXIT) == code, server.running.printed()[-2000:]


def at_start(number: int) -> Callable[[Path, random.Random], None]:
    """A signal at some moment of the start: the process ends, without a traceback, and leaves none behind."""

    def check(folder: Path, draws: random.Random) -> None:
        seen, code, printed = started(folder, draws, lambda process: process.send_signal(number), draws.uniform(0, 3.0))
        assert code in (-number, 0), printed
        assert "Traceback" not in printed, printed
        until(lambda: not any("_worker.py" in command_line(one) for one in seen))

    return check


def without(limit: int, low: int, high: int) -> Callable[[Path, random.Random], None]:
    """A start with few descriptors or little memory: it serves, or ends with a sentence."""

    def check(folder: Path, draws: random.Random) -> None:
        value = draws.randint(low, high)
        harm = lambda process: resource.prlimit(process.pid, limit, (value, value))  # noqa: E731
        _, code, printed = started(folder, draws, harm, 0.0)
        said = [line for line in printed.splitlines() if "Error: " in line]
        assert code == 0 or (code == 2 and len(said) == 1 and "Traceback" not in printed), printed

    return check


def started(
    folder: Path, draws: random.Random, harm: Callable[[subprocess.Popen[bytes]], object], after: float
) -> tuple[list[int], int, str]:
    """Start a server, harm it so many seconds later, and end it if it serves: its processes, exit code and output."""
    model = folder / "hashing"
    ports = ("--host", "127.0.0.1", "--grpc-port", "0", "--http-port", "0")
    log = folder / "start"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*map(str, (*SERVE, model, *OPTIONS, *TIMES, *ports))], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        time.sleep(after)
        seen = processes(process.pid)
        if process.poll() is None:
            harm(process)
        until(lambda: process.poll() is not None or b"sharp-serve: ready" in log.read_bytes(), 2 * WAIT_SECONDS)
        process.send_signal(signal.SIGTERM)
        return seen, process.wait(GRACE + EXIT), log.read_text(errors="replace")
    finally:
        process.kill()
        process.wait()


ENDS: dict[str, Callable[[Path, random.Random], None]] = {
    "kill -9 of the server under load": killed,
    "SIGTERM under load": told_to_end,
    "SIGTERM while a step hangs": told_to_end_while_stuck,
    "SIGTERM while the server is stopped": told_to_end_while_stopped,
    "SIGTERM without descriptors and disk": told_to_end_without_descriptors,
    "kill -9 of the server while it starts": at_start(signal.SIGKILL),
    "SIGTERM while the server starts": at_start(signal.SIGTERM),
    "few descriptors at the start of the server": without(resource.RLIMIT_NOFILE, 8, 120),
    "little memory at the start of the server": without(resource.RLIMIT_AS, 3 * 2**27, 2**31),
}


def check_end(folder: Path, name: str, seed: int) -> None:
    """Start a server, end it or let it fail to start, and look at what is left.

    Raises:
        AssertionError: an invariant does not hold.
    """
    make_model(folder)
    ENDS[name](folder, random.Random(f"{name} {seed}"))


def run_ends(
    folder: Path, names: list[str], times: int, report: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    """So many of each kind, each with a server of its own; how many there were, and what broke."""
    counts: Counter[str] = Counter()
    broken: list[str] = []
    for name in names:
        for seed in range(times):
            try:
                check_end(folder, name, seed)
            except Exception as error:
                broken.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
            counts[name] += 1
        report(f"{counts[name]:6} {name}")
    return counts, broken
