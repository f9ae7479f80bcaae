"""Starts and ends of a server: signals at any moment, and starts without descriptors, memory or disk."""

import os
import random
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.full.budgets.measure import processes
from tests.full.faults.harmed_server import (
    CLIENTS,
    EXIT,
    GRACE,
    OPTIONS,
    STALL,
    TIMES,
    WAIT_SECONDS,
    Honest,
    Server,
    chat,
    command_line,
    faulty_server,
    get,
    make_model,
    of_http,
    until,
)
from tests.serving.processes import SERVE


def killed(folder: Path, rng: random.Random) -> None:
    """Kill a server with SIGKILL under load: every client gets an error, and a successor serves on the same ports.

    No process of the killed server is left.
    """
    with faulty_server(folder) as server:
        chat(server)
        workers = processes(server.pid)[1:]
        with Honest(server) as honest:
            time.sleep(rng.uniform(0.1, 0.5))
            server.running.process.kill()
            server.running.process.wait()
            until(lambda: len(honest.errors) >= CLIENTS)
        assert honest.wrong == []
        until(lambda: not any("_worker.py" in command_line(process) for process in workers))
    ports = [
        option
        for option, at in (("--grpc-port", server.grpc_address), ("--http-port", server.http_address))
        for option in (option, at.rpartition(":")[2])
    ]
    with faulty_server(folder, *ports) as server:
        of_http(server, [1, 2, 3])


def told_to_end(folder: Path, rng: random.Random) -> None:
    """End a server with SIGTERM under load: it ends in time, and every client has its tokens or an error."""
    with faulty_server(folder) as server:
        chat(server)
        workers = processes(server.pid)[1:]
        with Honest(server) as honest:
            time.sleep(rng.uniform(0.1, 0.5))
            ends(server, signal.SIGTERM, 0)
        assert honest.wrong == [] and honest.right
        until(lambda: not any("_worker.py" in command_line(process) for process in workers))
        assert "Traceback" not in server.running.printed()


def told_to_end_while_stuck(folder: Path, rng: random.Random) -> None:
    """End a server whose step never ends: health reports the step, and SIGTERM ends the process in time.

    Every client gets an error.
    """
    with faulty_server(folder) as server:
        chat(server)
        with Honest(server) as honest:
            server.at_step("hangs", rng.randrange(5))
            until(lambda: get(server, "/health/live") == 503, 2 * STALL + WAIT_SECONDS)
            assert server.metrics()["sharp_engine_step_running_seconds"] > STALL
            ends(server, signal.SIGTERM, 124)
        assert honest.wrong == [] and honest.errors


def told_to_end_while_stopped(folder: Path, rng: random.Random) -> None:
    """Send SIGTERM to a stopped process, which ends in time once it is continued."""
    with faulty_server(folder) as server, Honest(server) as honest:
        until(lambda: honest.right)
        os.kill(server.pid, signal.SIGSTOP)
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(rng.uniform(0.1, 1.0))
        ends(server, signal.SIGCONT, 0)
    assert honest.wrong == []


def told_to_end_without_descriptors(folder: Path, rng: random.Random) -> None:
    """End a server with SIGTERM while it can open no file and the disk of its log is full."""
    with faulty_server(folder) as server, Honest(server) as honest:
        until(lambda: honest.right)
        for limit, value in ((resource.RLIMIT_NOFILE, 1), (resource.RLIMIT_FSIZE, 1)):
            resource.prlimit(server.pid, limit, (value, resource.prlimit(server.pid, limit)[1]))
        time.sleep(rng.uniform(0.1, 0.5))
        ends(server, signal.SIGTERM, 0)
    assert honest.wrong == []


def ends(server: Server, number: int, code: int) -> None:
    """Send a signal, and check that it ends the process in time, with the exit code `code`."""
    os.kill(server.pid, number)
    assert server.running.process.wait(GRACE + EXIT) == code, server.running.printed()[-2000:]


def at_start(number: int) -> Callable[[Path, random.Random], None]:
    """Return a check that sends a signal during the start: the process ends without a traceback or child processes."""

    def check(folder: Path, rng: random.Random) -> None:
        seen, code, printed = started(folder, lambda process: process.send_signal(number), rng.uniform(0, 3.0))
        assert code in (-number, 0), printed
        assert "Traceback" not in printed, printed
        until(lambda: not any("_worker.py" in command_line(process) for process in seen))

    return check


def without(limit: int, low: int, high: int) -> Callable[[Path, random.Random], None]:
    """Return a check that starts a server with few descriptors or little memory.

    The server serves, or ends with one sentence.
    """

    def check(folder: Path, rng: random.Random) -> None:
        value = rng.randint(low, high)
        _, code, printed = started(folder, lambda process: resource.prlimit(process.pid, limit, (value, value)), 0.0)
        said = [line for line in printed.splitlines() if "Error: " in line]
        assert code == 0 or (code == 2 and len(said) == 1 and "Traceback" not in printed), printed

    return check


def started(
    folder: Path, harm: Callable[[subprocess.Popen[bytes]], object], after: float
) -> tuple[list[int], int, str]:
    """Start a server, harm it `after` seconds later, and end it if it serves.

    Returns the ids of its processes, its exit code and its output.
    """
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
    """Start a server, end it or let it fail to start, and check the files and processes that are left.

    Raises:
        AssertionError: An invariant does not hold.
    """
    make_model(folder)
    ENDS[name](folder, random.Random(f"{name} {seed}"))


def run_ends(
    folder: Path, names: list[str], times: int, report: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    """Run each kind of end `times` times, each with a new server; return the counts and the broken invariants."""
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
