"""The Node example of `docs/clients/node`, against the real server. Skipped where there is no npm."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sharp.serving.config import TlsConfig
from tests.missing_tools import optional
from tests.serving.security.test_security import Authority

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "clients" / "node"

pytestmark = optional("npm")


@pytest.fixture(scope="module")
def example():
    """Return the folder of the example with its packages, which are installed only once."""
    folder = ROOT / "build" / "node-client"
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    if not (folder / "node_modules" / ".package-lock.json").exists():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True, timeout=240)
    return folder


def run(folder, *arguments, **environment):
    return subprocess.run(
        ["node", "generate.mjs", *arguments],
        cwd=folder,
        env={**os.environ, "NODE_NO_WARNINGS": "1", "SHARP_PROTO": str(ROOT / "proto"), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_streams_a_completion(example, start_server, counting):
    result = run(example, start_server(counting).grpc_address, "a", "5")
    assert (result.returncode, result.stdout) == (0, "bcdef")
    assert "FINISH_REASON_LENGTH: 1 tokens read, 5 generated" in result.stderr


def test_tls_and_a_token(example, start_server, counting, server_settings, tmp_path):
    authority, tokens = Authority(tmp_path), tmp_path / "tokens"
    tokens.write_text("secret")
    server = replace(server_settings.server, tls=TlsConfig(*authority.issue("server")), token_file=tokens)
    address = start_server(counting, server=server).grpc_address
    result = run(example, address, "a", "2", SHARP_CA=str(authority.file), SHARP_TOKEN="secret")
    assert (result.returncode, result.stdout) == (0, "bc")
    result = run(example, address, "a", "2", SHARP_CA=str(authority.file))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("UNAUTHENTICATED: this server asks for a token")


def test_errors_are_one_line(example, start_server, counting):
    result = run(example, start_server(counting).grpc_address, "")
    assert (result.returncode, result.stderr) == (1, "INVALID_ARGUMENT: prompt has 0 tokens; it must have at least 1\n")
