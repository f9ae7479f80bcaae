"""The commands say in one sentence which package is missing, and their help and messages fit their readers."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner

from sharp.core.cli import COMMANDS, load_command, main
from sharp.core.grouped_help import GroupedCommand
from tests.terminal import on_terminal

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "models" / "checkpoints" / "text-ssa.safetensors"
SHARP = (sys.executable, "-c", "from sharp.core.cli import main; main(prog_name='sharp')")
# `sharp check-normalizer` with its checks replaced, because the real checks import torch and take seconds.
CHECK_NORMALIZER = (
    sys.executable,
    "-c",
    "import sys; from types import SimpleNamespace as Module\n"
    "check = Module(name='gradients', problem='', note='')\n"
    "sys.modules['sharp.plugins.custom.checks'] = Module(run_checks=lambda custom: [check])\n"
    "sys.modules['sharp.plugins.op.custom_normalizer'] = Module(in_file=lambda file: Module(name='mine'))\n"
    "from sharp.core.cli import main; main(['check-normalizer', 'mine.py'])",
)
NO_FILE = (*SHARP, "generate", "none/there", "Hello")
STATUS = re.compile(r"\x1b\[\?25l.*\x1b\[2K", re.DOTALL)  # from a hidden cursor to an erased line
NO_COMMAND = (*SHARP, "exprt")


@pytest.mark.parametrize(("script", "module", "extra"), [("serve", "grpc", "serve"), ("export", "onnx", "export")])
def test_a_missing_extra_is_one_sentence(script: str, module: str, extra: str) -> None:
    source = str(CHECKPOINT) if script == "export" else "."
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['sharp-{script}', {source!r}, *sys.argv[1:]]\n"
        f"from sharp.core.cli import run_script; run_script({script!r})"
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
    code = "from sharp.core.cli import run_script; run_script('export')"
    result = subprocess.run(
        [sys.executable, "-c", code, CHECKPOINT, "--norm", "ssa", "-o", tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "is installed but cannot be imported: libprotobuf.so: cannot open shared object file" in result.stderr
    assert "Traceback" not in result.stderr


HEAVY = {"torch", "transformers", "onnx", "onnxscript", "matplotlib", "scipy", "numpy", "onnxruntime", "tokenizers"}
HEAVY |= {"grpc", "google.protobuf", "starlette", "uvicorn", "prometheus_client", "llguidance", "jinja2"}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from sharp.core.cli import main\n"
        f"main([{command!r}, '-h'], standalone_mode=False)\n"
        f"print(*{HEAVY!r} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines()[-1] == ""
    text = " ".join(result.stdout.split())
    pages = re.findall(r"sharp docs ([\w/-]+)", text[text.rindex("See also: ") :])
    assert pages and all((ROOT / "docs" / f"{page}.md").is_file() for page in pages), pages


def helped(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments, prog_name="sharp")
    assert result.exit_code == 0, result.output
    return result.output


def titles(text: str) -> list[str]:
    return re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)


def options(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))


def test_commands_are_listed_by_what_they_do() -> None:
    text = helped("-h")
    assert titles(text) == ["Options", "Make a model", "Run it", "Inspect and measure", "Machines", "Read"]
    assert set(re.findall(r"^  ([a-z][a-z-]+) ", text, re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize(("command", "group"), [("serve", "memory"), ("export", "precision")])
def test_short_help_has_the_common_options_and_names_the_groups_of_the_others(command: str, group: str) -> None:
    short, everything, one = (helped(command, option) for option in ("-h", "--help=all", f"--help={group}"))
    assert short == helped(command, "--help") == helped(command, "--help=common")
    assert len(short.splitlines()) < 75
    assert options(short) < options(everything)
    assert options(one) < options(everything)
    assert titles(one) == [group.capitalize()]
    declared = [option for option in load_command(command).params if isinstance(option, click.Option)]
    assert len(options(everything)) == len(declared) + 2  # --help and --version are not among the declared options
    assert all(not options(everything).isdisjoint(option.opts) for option in declared)
    named = " ".join(short.split()).rpartition("those of: ")[2].partition(".")[0].split(", ")
    assert named == [title.lower() for title in titles(everything)]
    assert options(everything) == set().union(*(options(helped(command, f"--help={name}")) for name in named))


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in sorted(COMMANDS)), ("bench", "serve"), ("cache", "remove")]
)
def test_every_command_has_help_of_all_and_a_version(command: tuple[str, ...]) -> None:
    """`--help=all` and `--version` were errors of most commands."""
    assert helped(*command, "--version") == f"sharp, version {version('sharp-attention')}\n"
    everything, short = helped(*command, "--help=all"), helped(*command, "-h")
    assert options(short) <= options(everything)
    assert helped("help", *command) == short


def test_help_of_all_has_that_of_every_command_below() -> None:
    shown = helped("bench", "--help=all")
    assert "Usage: sharp bench serve [OPTIONS] ADDRESS" in shown and "--rate" in shown
    assert "Usage: sharp bench latency [OPTIONS] FOLDER..." in shown and "--passes" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("help", "exprt"), "No such command 'exprt'. Did you mean 'export'?"),
        (("bench", "serv"), "No such command 'serv'. Did you mean 'serve'?"),
        (("cache", "help", "rm"), "No such command 'rm'."),
        (("export", "--nrom", "ssa"), "No such option '--nrom'. (Did you mean one of: '--norm', '--norm-map'?)"),
    ],
)
def test_help_of_what_is_none(arguments: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.output.splitlines()[-1]) == (2, f"Error: {sentence}")


@pytest.mark.parametrize(
    ("arguments", "place", "kept"),
    [
        (("export", "model.gguf"), "sharp.exporter.export_command.parse_reference", "no model folder was written"),
        (
            ("adapt", "m.gguf", "--norm", "ssa"),
            "sharp.exporter.adapt.cli.Console",
            "what was done until the last save is in m-ssa-adapted.partial; the same command goes on from there",
        ),
        (("inspect", "model.gguf"), "sharp.exporter.inspection.cli.check_exists", "nothing was written"),
        (("bench", "serve", "127.0.0.1:1"), "sharp.serving.bench.cli._measure", "no figures are kept"),
        (("generate", "127.0.0.1:1", "a"), "sharp.serving.cli._prompt", ""),
    ],
)
def test_after_ctrl_c_a_command_says_what_is_kept(monkeypatch, tmp_path, arguments, place, kept) -> None:
    """It ended with exit code 130 alone, and nobody knew whether a folder was half-written."""
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").write_bytes(b"")
    monkeypatch.setattr("sharp.exporter.adapt.cli.check_adaptable", lambda _path: None)
    monkeypatch.setattr(place, Mock(side_effect=KeyboardInterrupt))
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == ("\n" + (f"Interrupted: {kept}\n" if kept else ""))


def test_the_word_behind_a_bare_h_is_no_group() -> None:
    assert helped("serve", "-h", "memory") == helped("serve", "--help", ".") == helped("serve", "-h")


def test_a_group_that_is_none_is_refused_with_the_names_of_all() -> None:
    result = CliRunner().invoke(main, ["serve", "--help=netwrok"])
    assert (result.exit_code, "'netwrok' is not one of" in result.stderr, "'network'" in result.stderr) == (
        2,
        True,
        True,
    )


@pytest.mark.parametrize("name", ["adapt", "export", "generate", "serve"])
def test_every_flag_of_a_group_is_an_option_of_the_command(name: str) -> None:
    command = load_command(name)
    assert isinstance(command, GroupedCommand)
    flags = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    grouped = {flag for group in command.groups.values() for flag in group}
    assert grouped | command.common <= flags


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
    shown = STATUS.sub("", shown)
    assert coloured in shown
    plain = shown.replace("\x1b[31m\x1b[1m", "").replace("\x1b[32m", "").replace("\x1b[0m", "")
    without = on_terminal(command, NO_COLOR="1")
    assert (without[0], STATUS.sub("", without[1])) == (code, plain)
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (piped.returncode, piped.stdout + piped.stderr) == (code, plain)
    assert "\x1b" not in plain


def test_an_error_on_a_terminal_is_one_sentence() -> None:
    code, shown = on_terminal(NO_FILE, NO_COLOR="1")
    assert (code, shown.count("\n"), shown.startswith("Error: there is no file or folder ")) == (2, 1, True), shown
