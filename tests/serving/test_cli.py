import asyncio
import gc
import os
import signal
import socket
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from sharp import Client
from sharp.serving import cli
from sharp.serving.cli import generate, serve
from sharp.serving.engine import model_folder
from tests.marks import full
from tests.serving.conftest import wait_for
from tests.serving.processes import server_process


def run(command, *arguments, **options):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], prog_name="sharp", **options)
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def address(start_server, counting):
    return start_server(counting).grpc_address


def test_generate_prints_the_text(address):
    result = run(generate, address, "a", "--temperature", 0, "--max-tokens", 5)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "bcdef\n", "")


def test_generate_takes_all_its_options(address):
    options = "--top-k 1 --top-p 0.5 --seed 3 --ignore-eos --stop xyz --stop e --model counting --attention"
    result = run(generate, address, "a", *options.split())
    assert (result.exit_code, result.stdout) == (0, "bcd\n")
    assert "From the sharpest head to the most dispersed" in result.stderr


def test_generate_reads_a_long_prompt_from_stdin(address):
    result = run(generate, address, "-", "--temperature", 0, "--max-tokens", 2, input="x" * 100 + "a")
    assert result.stdout == "bc\n"


def test_generate_with_token_ids(address):
    result = run(generate, address, "--token-ids", "1,2,3", "--temperature", 0, "--max-tokens", 3)
    assert result.stdout == "4 5 6 \n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--max-tokens", "-1"], "max_tokens is -1; it must be a number at least 0"),
        (["a", "--temperature", "nan"], "temperature is nan; it must be a number at least 0"),
        (["a", "--max-tokens", str(10**12)], "max_tokens is 1000000000000; it must be a number from 0 to 2147483647"),
        (["a", "--seed", "-1"], "seed is -1; it must be a number from 0 to 18446744073709551615"),
        (["a", "--model", "other"], "model 'other' is not served here; the server has 'counting'"),
        ([""], "prompt has 0 tokens; it must have at least 1"),
        ([], "give either PROMPT or --token-ids"),
        (["--token-ids", "1,x"], "--token-ids is '1,x'; it must be whole numbers, separated by commas"),
    ],
)
def test_generate_reports_an_error_in_one_sentence(address, arguments, message):
    result = run(generate, address, *arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {message}\n")


def test_a_completion_that_is_cut_short_is_an_error(address, steps, monkeypatch):
    monkeypatch.setattr(model_folder, "new_request_id", lambda: "known")
    with ThreadPoolExecutor(1) as pool, Client(address) as client:
        cut = pool.submit(run, generate, address, "a", "--temperature", 0, "--max-tokens", 100)
        wait_for(lambda: len(steps) > 2)
        client.abort("known")
        result = cut.result(20)
    assert result.exit_code == 2
    assert result.stdout.startswith("bc")
    assert result.stderr == "Error: the completion is not complete: the server ended, or the request was aborted\n"


def test_generate_from_a_folder(counting):
    result = run(generate, counting, "a", "--temperature", 0, "--max-tokens", 5, "--attention")
    assert (result.exit_code, result.stdout) == (0, "bcdef\n")
    assert "From the sharpest head" in result.stderr


def test_a_terminal_shows_what_is_loaded(counting):
    arguments = (counting, "a", "--temperature", 0, "--max-tokens", 1)
    shown = run(generate, *arguments, env={"TTY_COMPATIBLE": "1", "COLUMNS": "500"})
    assert (shown.stdout, f"Loading {counting}" in shown.stderr) == ("b\n", True)
    assert run(generate, *arguments).stderr == ""
    served = run(serve, counting, "--host", "none.invalid", env={"TTY_COMPATIBLE": "1"})
    assert served.stderr.startswith(f"Loading {counting}\n")
    assert not run(serve, counting, "--host", "none.invalid").stderr.startswith("Loading")


def test_generate_from_a_folder_that_is_not_there(tmp_path):
    result = run(generate, tmp_path / "smollm", "a")
    assert result.exit_code == 2
    sentence = (
        f"there is no file or folder {tmp_path / 'smollm'}; give a model folder, a checkpoint, or a server as host:port"
    )
    assert sentence in result.stderr


def test_generate_from_a_folder_takes_nothing_that_is_a_servers(counting):
    result = run(generate, counting, "a", "--token", "secret")
    assert result.exit_code == 2
    assert "--model, --token and TLS are for a server" in result.stderr


def test_serve_refuses_a_port_in_use_and_a_folder_that_is_none(counting, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(serve, counting, "--grpc-port", port, "--http-port", 0)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"Error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --grpc-port"
    ]
    result = run(serve, tmp_path / "none", "--grpc-port", 0, "--http-port", 0)
    assert result.exit_code == 2
    assert "none does not exist; give a model folder, a checkpoint" in result.stderr
    result = run(serve, tmp_path, "--grpc-port", 0, "--http-port", 0)
    assert result.exit_code == 2
    assert "is not a model folder" in result.stderr
    result = run(serve, counting, "--cache-tokens", 10**15, "--grpc-port", 0, "--http-port", 0, "--no-kernels")
    assert result.exit_code == 2
    assert "cache_tokens is 1000000000000000, which needs" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "a" * 70], "there is no such address; choose another --host"),
        (["--max-waiting-requests", 2**32], "max_waiting_requests is 4294967296; it must be at most 2147483647"),
        (["--speculative-tokens", -1], "speculative_tokens is -1; it must be at least 0"),
        (["--speculative-tokens", 2**32], "speculative_tokens is 4294967296; it must be at most 2147483647"),
        (["--max-waiting-tokens", 2**64], "max_waiting_tokens is 18446744073709551616; it must be at most 2147483647"),
    ],
)
def test_serve_refuses_what_no_server_can_have(counting, options, message):
    result = run(serve, counting, "--grpc-port", 0, "--http-port", 0, "--no-kernels", *options)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")], ids=repr)
def test_a_start_without_memory_is_one_sentence(counting, monkeypatch, error):
    """A start without enough memory ends with one sentence. Once it was a traceback."""
    monkeypatch.setattr("sharp.serving.cli.read_settings", Mock(side_effect=error))
    result = run(serve, counting)
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: there is not enough memory; see also ulimit -v and ulimit -u\n",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, full(signal.SIGINT)])
def test_serve_until_a_signal(counting, number):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with server_process(counting, "--no-kernels", environment=environment) as server:
        assert run(generate, server.grpc, "a", "--temperature", 0, "--max-tokens", 3).stdout == "bcd\n"
        server.process.send_signal(number)
        code, printed = server.process.wait(60), server.printed()
    assert (code, "Traceback" in printed) == (0, False)
    for words in ("counting", "softmax", "32768 tokens in blocks of 4", "2048 tokens a step", "gRPC", "/metrics"):
        assert words in printed


def test_what_cancelled_requests_leave_behind_is_freed_while_the_server_runs(monkeypatch):
    class Cycle:
        def __init__(self):
            self.itself = self

    async def serve():
        cli._collect(asyncio.get_running_loop())
        left = weakref.ref(Cycle())
        async with asyncio.timeout(60):
            while left() is not None:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(cli, "COLLECTION_SECONDS", 0.05)
    gc.disable()
    gc.freeze()  # otherwise a garbage collection takes seconds where many tests ran before
    try:
        asyncio.run(serve())
    finally:
        gc.unfreeze()
        gc.enable()
