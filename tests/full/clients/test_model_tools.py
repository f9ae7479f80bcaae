"""The exported model in other people's tools, at the versions of requirements-tools.txt."""

import subprocess

import pytest
import torch
from click.testing import CliRunner

from sharp.exporter.cli import export
from sharp.models.checkpoint import save_checkpoint
from tests.exporter.conftest import tiny_model
from tests.full.clients.clients import INSTALLED, PROGRAMS

PYTHON = INSTALLED / "tools" / "bin" / "python"


@pytest.mark.parametrize("norm", ["softmax"])
def test_a_portable_model_is_read_by_openvino_and_quantized(tmp_path, norm):
    if not PYTHON.is_file():
        pytest.skip("OpenVINO is not installed; make clients")
    checkpoint = tmp_path / "tiny.safetensors"
    save_checkpoint(checkpoint, tiny_model(norm, "nape", eos_token_ids=(256,)), dtype=torch.float32)
    flags = ["--norm", norm, "--target", "portable", "--cache", "none", "-o", str(tmp_path / "out")]
    exported = CliRunner().invoke(export, [str(checkpoint), *flags])
    assert exported.exit_code == 0, exported.output
    command = [PYTHON, PROGRAMS / "model_tools.py", tmp_path / "out", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
