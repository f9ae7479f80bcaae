"""Output that cannot be written, to a full disk or a pipe that nobody reads, ends with a sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

SHARP = [sys.executable, "-c", "from sharp.core.cli import main; main()"]


def run(stdout: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*SHARP, *arguments]
    if stdout == "closed pipe":
        with subprocess.Popen(["true"], stdin=subprocess.PIPE, text=True) as reader:
            reader.wait()
            return subprocess.run(
                command, stdout=reader.stdin, stderr=subprocess.PIPE, text=True, timeout=60, check=False
            )
    with Path("/dev/full").open("w") as full:
        return subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("stdout", "reason"), [("full", "No space left on device"), ("closed pipe", "Broken pipe")], ids=["full", "pipe"]
)
def test_a_server_that_cannot_print_its_addresses_ends_with_a_sentence(counting: Path, stdout: str, reason: str):
    """A server that cannot print its addresses ends with one sentence.

    Once it ended with "Event loop is closed" and a coroutine that was never awaited.
    """
    ports = ["--grpc-port", "0", "--http-port", "0"]
    done = run(stdout, "serve", str(counting), *ports, "--device", "cpu", "--no-kernels", "--no-verify-files")
    said = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert (done.returncode, len(said)) == (2, 1), done.stderr
    assert said[0].startswith(f"Error: the server's addresses cannot be written to stdout: {reason}; send stdout to")


def test_a_command_whose_errors_cannot_be_printed_either_ends_with_the_same_exit_code():
    """A command that cannot print its error keeps its exit code.

    Once the exit code was 1, as of a defect.
    """
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*SHARP, "--help"], stdout=full, stderr=full, timeout=60, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]], ids=" ".join)
def test_help_that_cannot_be_printed_ends_with_a_sentence(arguments: list[str]):
    done = run("full", *arguments)
    remedy = "make room on that disk, or choose another"
    assert (done.returncode, done.stderr) == (2, f"Error: [Errno 28] No space left on device; {remedy}\n")
