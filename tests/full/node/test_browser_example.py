"""The browser's example of `docs/clients/browser`, in Node and in Chromium. Skipped where there is no npm."""

import functools
import http.server
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sharp.exporter.cli import export
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.models.checkpoint import save_checkpoint
from tests.exporter.conftest import tiny_model
from tests.full.browser.chromium import Chromium
from tests.missing_tools import optional

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "clients" / "browser"
PROMPT, TOKENS = "Hello", 12

pytestmark = optional("npm")


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Return the folder of the example with a model and its packages, which are installed only once."""
    folder = ROOT / "build" / "browser-client"
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules", "model"))
    shutil.copy(Path(__file__).with_name("browser_example.mjs"), folder)
    if not (folder / "node_modules" / ".package-lock.json").exists():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True, timeout=240)
    shutil.rmtree(folder / "model", ignore_errors=True)
    checkpoint = tmp_path_factory.mktemp("checkpoint") / "tiny.safetensors"
    save_checkpoint(checkpoint, tiny_model("asentmax", "nape", eos_token_ids=(256,)), dtype=torch.float32)
    flags = ["--norm", "asentmax", "--cache", "contiguous", "--target", "portable", "-o", str(folder / "model")]
    assert CliRunner().invoke(export, [str(checkpoint), *flags]).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def expected(example):
    """Return the completion that ONNX Runtime computes in Python; a token of the model is a byte."""
    session = ContiguousSession(example / "model", kernels=False)
    tokens = session.generate(np.array([[*PROMPT.encode()]]), TOKENS)[0].tolist()
    assert 256 not in tokens
    return bytes(tokens).decode(errors="replace")


def run(folder, model="model", prompt=PROMPT):
    command = ["node", "browser_example.mjs", model, prompt, str(TOKENS)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_it_completes_in_node(example, expected):
    result = run(example)
    assert (result.returncode, result.stdout, result.stderr) == (0, expected, "")


def test_errors_are_one_sentence(example, tmp_path):
    for arguments, said in (
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"model": str(tmp_path)}, "the model folder has no model.onnx"),
    ):
        result = run(example, **arguments)
        assert (result.returncode, result.stderr) == (1, said)


def test_it_completes_in_a_browser(example, expected, tmp_path):
    handler = functools.partial(QuietHandler, directory=example)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Chromium(tmp_path)
        try:
            browser.open(f"http://127.0.0.1:{server.server_port}/", width=900, height=600, scheme="light")
            browser.wait_for("document.getElementById('status').textContent !== 'Loading the model'", 60)
            assert browser.evaluate("document.getElementById('status').textContent") == "Ready"
            browser.evaluate(f"document.querySelector('[name=prompt]').value = '{PROMPT}'")
            browser.evaluate(f"document.querySelector('[name=tokens]').value = {TOKENS}")
            browser.evaluate("document.querySelector('button').click()")
            browser.wait_for("document.getElementById('status').textContent.startsWith('Done: ')", 60)
            assert browser.evaluate("document.getElementById('text').textContent") == PROMPT + expected
            assert not browser.errors
        finally:
            browser.close()
            server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A handler of HTTP requests that logs nothing."""

    def log_message(self, *_arguments):
        pass
