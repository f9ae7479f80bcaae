"""The process ends within the grace period and a few seconds after SIGTERM, and by itself if it loses its GPU."""

import contextlib
import fcntl
import os
import signal
import sys
import urllib.request

import pytest

from tests.marks import full
from tests.serving.processes import SERVE, ServerProcess, server_process

STUCK = """
import sys, time
from sharp.core.cli import serve_main
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.engine.engine import Engine
{patched} = lambda *_: print("stuck", flush=True) or time.sleep(600)
sys.argv[0] = "sharp-serve"
serve_main()
"""

LOST = """
import sys
from sharp.core.cli import serve_main
from sharp.serving.api.errors import DeviceLostError
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
works = OnnxRuntimeBackend.step
def step(backend, batch):
    if not batch.collect_stats:  # the first token, before the server is ready
        return works(backend, batch)
    raise DeviceLostError("the GPU is lost to this process")
OnnxRuntimeBackend.step = step
sys.argv[0] = "sharp-serve"
serve_main()
"""


def test_a_server_whose_gpu_is_lost_ends_so_that_it_is_started_again(counting):
    command = (sys.executable, "-c", LOST)
    with server_process(counting, "--threads", 1, "--grace-seconds", 5, command=command) as server:
        with pytest.raises(OSError):  # an HTTP error or a closed connection
            urllib.request.urlopen(_completion(server), timeout=10)
        assert server.process.wait(20) == 70
        assert "the GPU is lost to this process" in server.printed()


@pytest.mark.parametrize(("patched", "code"), [full("ModelFolder.prepare", 0), ("Engine.step", 124)])
def test_a_thread_that_does_not_return_ends_with_the_process(counting, patched, code):
    command = (sys.executable, "-c", STUCK.format(patched=patched))
    with server_process(counting, "--threads", 1, "--grace-seconds", 0.2, command=command) as server:
        with contextlib.suppress(TimeoutError):
            urllib.request.urlopen(_completion(server), timeout=1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(0.2 + 3 + 5) == code
        assert ("the process ends" in server.printed()) == bool(code)


@pytest.mark.parametrize("stuck", [False, full(True)])
def test_a_log_that_nobody_reads_holds_up_neither_requests_nor_the_end(counting, stuck):
    """A log that nobody reads blocks neither requests nor the end of the process.

    Once the server stood still after some hundred requests, health included, and SIGTERM did not end it.
    """
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write, b"x" * 4096)
    command = (sys.executable, "-c", STUCK.format(patched="Engine.step")) if stuck else SERVE
    with server_process(counting, "--threads", 1, "--grace-seconds", 0.2, command=command, stderr=write) as server:
        if stuck:
            with contextlib.suppress(TimeoutError):
                urllib.request.urlopen(_completion(server), timeout=1)
        else:
            for _ in range(10):
                assert urllib.request.urlopen(_completion(server), timeout=20).status == 200
            assert urllib.request.urlopen(f"http://{server.http}/health", timeout=20).status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(0.2 + 3 + 5) == (124 if stuck else 0)
    for end in (read, write):
        os.close(end)


def _completion(server: ServerProcess) -> urllib.request.Request:
    body = b'{"model": "counting", "prompt": "a"}'
    return urllib.request.Request(f"http://{server.http}/v1/completions", body, {"Content-Type": "application/json"})
