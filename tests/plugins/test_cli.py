"""The scripts say in one sentence what is not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.plugins.cli import COMMANDS, main
from tests.terminal import on_terminal

SHARP = (sys.executable, "-c", "from sharp.plugins.cli import main; main(prog_name='sharp')")
# `sharp check-normalizer`, but its checks: they import torch, and take seconds.
CHECK_NORMALIZER = (
    sys.executable,
    "-c",
    "import sys; from types import SimpleNamespace as Module\n"
    "check = Module(name='gradients', problem='', note='')\n"
    "sys.modules['sharp.plugins.custom.checks'] = Module(run_checks=lambda custom: [check])\n"
    "sys.modules['sharp.plugins.custom.normalizer'] = Module(in_file=lambda file: Module(name='mine'))\n"
    "from sharp.plugins.cli import main; main(['check-normalizer', 'mine.py'])",
)
NO_FILE = (*SHARP, "doctor", "none")
NO_COMMAND = (*SHARP, "exprt")


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


@pytest.mark.parametrize(
    ("command", "coloured"),
    [
        (NO_FILE, "\x1b[31m\x1b[1mError:\x1b[0m"),
        (NO_COMMAND, "\x1b[31m\x1b[1mError:\x1b[0m No such command 'exprt'"),
        (CHECK_NORMALIZER, "\x1b[32mok  \x1b[0m  gradients"),
    ],
    ids=["error", "usage", "check-normalizer"],
)
def test_a_terminal_has_colours_and_no_color_turns_them_off(command: tuple[str, ...], coloured: str) -> None:
    code, shown = on_terminal(command)
    assert coloured in shown
    plain = shown.replace("\x1b[31m\x1b[1m", "").replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert on_terminal(command, NO_COLOR="1") == (code, plain)
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (piped.returncode, piped.stdout + piped.stderr) == (code, plain)
    assert "\x1b" not in plain


def test_an_error_on_a_terminal_is_one_sentence() -> None:
    code, shown = on_terminal(NO_FILE, NO_COLOR="1")
    assert (code, shown.count("\n"), shown.startswith("Error: none ")) == (2, 1, True), shown
