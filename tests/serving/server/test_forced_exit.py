"""How the process ends: after SIGTERM within the grace period and a few seconds, and by itself with a lost GPU."""

import contextlib
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.marks import full
from tests.serving.server.test_rolling_restart import free_port

STUCK = """
import sys, time
from sharp.plugins.cli import serve_main
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.engine.engine import Engine
{patched} = lambda *_: print("stuck", flush=True) or time.sleep(600)
sys.argv[0] = "sharp-serve"
serve_main()
"""

LOST = """
import sys
from sharp.plugins.cli import serve_main
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
    port = free_port()
    command = [sys.executable, "-c", LOST, str(counting), "--http-port", str(port), "--grpc-port", "0"]
    options = ["--host", "127.0.0.1", "--threads", "1", "--grace-seconds", "5"]
    with subprocess.Popen(command + options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any("ready" in line for line in process.stdout)
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                b'{"model": "counting", "prompt": "a"}',
                {"Content-Type": "application/json"},
            )
            with pytest.raises(OSError):  # an HTTP status, or a connection that ends
                urllib.request.urlopen(request, timeout=10)
            assert process.wait(20) == 70
            assert "the GPU is lost to this process" in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize(("patched", "code"), [full("ModelFolder.prepare", 0), ("Engine.step", 124)])
def test_a_thread_that_does_not_return_ends_with_the_process(counting, patched, code):
    port = free_port()
    command = [
        sys.executable,
        "-c",
        STUCK.format(patched=patched),
        str(counting),
        "--http-port",
        str(port),
        "--grpc-port",
        "0",
    ]
    options = ["--host", "127.0.0.1", "--threads", "1", "--grace-seconds", "0.2"]
    with subprocess.Popen(command + options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            body = b'{"model": "counting", "prompt": "a"}'
            url = f"http://127.0.0.1:{port}/v1/completions"
            for _ in range(300):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        break
                except OSError:
                    time.sleep(0.1)
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with contextlib.suppress(TimeoutError):
                urllib.request.urlopen(request, timeout=1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(0.2 + 3 + 5) == code
            assert ("the process ends" in process.stderr.read()) == bool(code)
        finally:
            process.kill()
