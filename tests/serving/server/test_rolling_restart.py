"""Two servers behind one address: calls alternate, and a rolling restart under load loses no request."""

import socket
import threading
import time
from contextlib import ExitStack

import pytest

from sharp import Client, SamplingParams
from tests.full.end_to_end.commands import serve

THREADS = 4
MOST_REQUESTS = 3000  # of each thread, in case the restarts never end


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def requests_of(server):
    return sum(sample.value for sample in server.samples() if sample.name == "sharp_requests_total")


@pytest.mark.full
def test_a_rolling_restart_loses_nothing(counting, tmp_path):
    ports = [free_port(), free_port()]
    folders = [tmp_path / name / "counting" for name in "ab"]  # one folder per server, so that each has its own log
    for folder in folders:
        folder.parent.mkdir()
        folder.symlink_to(counting)
    address = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    stop = threading.Event()
    completions, failures = [], []

    def ask():
        with Client(address, attempts=5) as client:
            for _ in range(MOST_REQUESTS):
                if stop.is_set():
                    return
                try:
                    completions.append(client.generate("a", SamplingParams(temperature=0, max_tokens=8)).text)
                except Exception as error:
                    failures.append(error)
                time.sleep(0.02)

    with ExitStack() as running:
        stacks = [running.enter_context(ExitStack()) for _ in ports]

        def start(number):
            options = ("--grpc-port", str(ports[number]), "--threads", "1")
            return stacks[number].enter_context(serve(folders[number], *options))

        before = [start(number) for number in range(2)]
        running.callback(stop.set)  # otherwise the threads would go on after a failure
        threads = [threading.Thread(target=ask, daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        while len(completions) < 10 * THREADS and not failures:
            time.sleep(0.01)
        shares = [requests_of(server) for server in before]
        after = []
        for number, stack in enumerate(stacks):
            stack.close()  # send SIGTERM, and wait until the server has ended
            count = len(completions)
            after.append(start(number))
            # The other server has served meanwhile.
            assert len(completions) > count
            deadline = time.monotonic() + 20
            while requests_of(after[-1]) == 0 and time.monotonic() < deadline:
                time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join()
        assert min(requests_of(server) for server in after) > 0
    assert failures == []
    assert set(completions) == {"bcdefghi"}
    assert min(shares) > 0.3 * sum(shares)
