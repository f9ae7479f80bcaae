"""A client whose link is cut without a notice, between two network namespaces with a cable."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.missing_tools import missing

SERVER, CLIENT = "10.231.0.1", "10.231.0.2"
SHARP = str(Path(sys.executable).parent / "sharp")
SERVE_SLOWLY = """
import time
from sharp.serving.cli import serve
from sharp.serving.engine.engine import Engine
step = Engine.step
def slow(engine):
    time.sleep(0.4)
    return step(engine)
Engine.step = slow
serve()
"""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def namespaces():
    """Yield the names of two namespaces; the end of their cable in the first namespace is named `server`."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        missing("network namespaces need root and the command ip")
    names = [f"sharp-{side}-{os.getpid()}" for side in ("server", "client")]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "server", "netns", names[0], "type", "veth", "peer", "name", "client", "netns", names[1])
        for name, end, address in zip(names, ("server", "client"), (SERVER, CLIENT), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def inside(namespace, *command):
    return subprocess.Popen(
        ["timeout", "90", "ip", "netns", "exec", namespace, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def line_with(process, pattern):
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"the output ended without {pattern}")


def test_the_request_of_a_client_behind_a_cut_link_ends(namespaces, counting):
    """A request ends when its client's link is cut, after TCP's keepalive timeout of 20 s.

    The whole completion would take 50 s.
    """
    server = inside(
        namespaces[0],
        *(sys.executable, "-c", SERVE_SLOWLY, str(counting)),
        *("--host", SERVER, "--grpc-port", "0", "--http-port", "0", "--threads", "1"),
    )
    clients = []

    def ask(tokens):
        clients.append(inside(namespaces[1], SHARP, "generate", address, "a", "--temperature", "0", *tokens))
        return clients[-1]

    try:
        address = line_with(server, "ready grpc=(.*) http=")[1]
        assert ask(["--ignore-eos"]).stdout.read(2) == "bc"
        ip("-n", namespaces[0], "link", "set", "server", "down")
        assert line_with(server, r"outcome=(\w+)")[1] == "cancelled"
        ip("-n", namespaces[0], "link", "set", "server", "up")
        assert ask(["--max-tokens", "2"]).communicate(timeout=30)[0] == "bc\n"
    finally:
        for process in (server, *clients):
            process.terminate()
            process.wait(20)
