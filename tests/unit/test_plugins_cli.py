"""The scripts say in one sentence what is not installed."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("script", "module", "extra"), [("serve", "grpc", "serve"), ("export", "onnx", "export")])
def test_a_missing_extra_is_one_sentence(script: str, module: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['sharp-{script}', 'x', *sys.argv[1:]]\n"
        f"from sharp.plugins.cli import run_script; run_script({script!r})"
    )
    options = ["--norm", "ssa"] if script == "export" else []
    result = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert f"pip install 'sharp-attention[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr
