"""The scripts say in one sentence what is not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.plugins.cli import COMMANDS, main


@pytest.mark.parametrize(("script", "module", "extra"), [("serve", "grpc", "serve"), ("export", "onnx", "export")])
def test_a_missing_extra_is_one_sentence(script: str, module: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['sharp-{script}', '.', *sys.argv[1:]]\n"
        f"from sharp.plugins.cli import run_script; run_script({script!r})"
    )
    options = ["--norm", "ssa"] if script == "export" else []
    result = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert f"pip install 'sharp-attention[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_package_that_cannot_be_imported_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "__init__.py").write_text(
        "raise ImportError('libprotobuf.so: cannot open shared object file')"
    )
    code = "from sharp.plugins.cli import run_script; run_script('export')"
    result = subprocess.run(
        [sys.executable, "-c", code, ".", "--norm", "ssa"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "is installed but cannot be imported: libprotobuf.so: cannot open shared object file" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        f"import sys; from sharp.plugins.cli import load_command; load_command({command!r})\n"
        "print(*{'torch', 'transformers', 'onnx', 'onnxscript', 'matplotlib', 'scipy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == ""


@pytest.mark.parametrize(
    ("script", "words", "completed"),
    [
        ("sharp", "sharp ex", "export"),
        ("sharp", "sharp serve --dev", "--device"),
        ("sharp-export", "sharp-export --tar", "--target"),
    ],
)
def test_the_shell_completes_commands_and_options(script: str, words: str, completed: str) -> None:
    variable = f"_{script.replace('-', '_').upper()}_COMPLETE"
    environment = {**os.environ, variable: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = subprocess.run(
        [Path(sys.executable).parent / script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.splitlines() == [f"plain,{completed}"]


def test_a_misspelt_command_is_named() -> None:
    result = CliRunner().invoke(main, ["exprt"])
    assert (result.exit_code, result.output.splitlines()[-1]) == (
        2,
        "Error: No such command 'exprt'. Did you mean 'export'?",
    )
