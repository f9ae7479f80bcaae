"""Faults of commands that write: a kill at any moment, and a disk that is full, read-only, slow or fails once."""

import errno
import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import sharp.models.hugging_face  # noqa: F401 - teaches transformers the model type
from sharp import LLM, SamplingParams
from sharp.core.checksums import damaged_files
from sharp.models.byte_tokenizer import byte_tokenizer
from sharp.models.checkpoint import read_checkpoint, save_checkpoint
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import tiny

TEXT = "".join(f"{number} green bottles hang on the wall, number {number * 7}.\n\n" for number in range(1500))
SIZES = "--layers 1 --heads 2 --hidden-size 16 --lengths 2-6 --batch 8 --steps 12 --set symbols=5 --threads 1"
CHANGES = {"export": 19, "adapt": 36, "train": 60}  # changes that a whole run makes to its files
BYTES = {"export": 210_000, "adapt": 430_000, "train": 860_000}  # bytes that a whole run writes
SECONDS = {"export": 5.0, "adapt": 4.0, "train": 2.5}  # rough duration of a whole run


NOT_MOUNTED = "no disk can be mounted"  # output of the host without the right to mount


@dataclass
class Done:
    """The exit code (a signal's as a negative number), the output and the seconds of a command."""

    code: int
    output: str
    seconds: float


class Commands:
    """The commands, with their inputs in `folder`, and a process that forks for each run of a command."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self._inputs = folder / "inputs"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.full.faults.command_host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "host").open("wb"),
        )
        save_checkpoint(self._inputs / "tiny.safetensors", tiny_model("softmax"))
        tiny("llama", vocab_size=300).save_pretrained(self._inputs / "teacher")
        PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(self._inputs / "teacher")
        (self._inputs / "bottles.txt").write_text(TEXT)
        self.right = {}  # result of each command without a fault
        for name in CHANGES:
            self.clear()
            done = self.run(name, {})
            assert done.code == 0, done.output
            self.right[name] = self.check(name)

    def clear(self) -> None:
        """Empty the folder that the commands write to."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()

    def run(self, name: str, fault: dict[str, Any]) -> Done:
        """Run a command with a fault of `command_host`."""
        given, root = self._inputs, self.root
        text = f"--text {given}/bottles.txt --held-out {given}/bottles.txt"
        arguments = {
            "export": f"{given}/tiny.safetensors --norm softmax -o {root}/out -q",
            "adapt": f"{given}/teacher --norm entmax {text} --length 24 --tokens 96 --rank 4 -o {root}/out -q "
            "--measure-length 24",
            "train": f"sort --norm entmax {SIZES} --work {root}/work --output {root}/out.safetensors",
        }[name].split()
        request = {"command": name, "arguments": arguments, "root": str(root), "fault": fault}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return Done(**json.loads(self._process.stdout.readline()))

    def check(self, name: str) -> str:
        """Check that the result of a command can be used, and return a hash of its weights.

        Raises:
            Exception: The result cannot be used.
        """
        output = self.root / "out"
        if name == "train":
            output = self.root / "out.safetensors"
            read_checkpoint(output)
            rows = (self.root / "work" / "loss.csv").read_text().splitlines()
            assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(1, 13))], rows
            return hashlib.sha256(output.read_bytes()).hexdigest()
        if name == "adapt":
            AutoModelForCausalLM.from_pretrained(output)
            assert json.loads((output / "report.json").read_text())["norm"] == "entmax"
            assert "</html>" in (output / "report.html").read_text()
            return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()
        assert damaged_files(output) == []
        assert LLM(output).generate("a", SamplingParams(temperature=0, max_tokens=3))[0].token_ids
        return hashlib.sha256((output / "model.onnx.data").read_bytes()).hexdigest()

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder that a user takes for a result."""
        return (self.root / ("out.safetensors" if name == "train" else "out")).exists()

    def left(self) -> list[str]:
        """Return the names of files that are neither results nor states."""
        names = [str(file.relative_to(self.root)) for file in self.root.rglob("*") if file.is_file()]
        return [name for name in names if "partial" in name]

    def close(self) -> None:
        """End the process that forks for runs."""
        self._process.kill()
        self._process.wait()


def killed(rng: random.Random, name: str) -> dict[str, Any]:
    """Return a fault that kills a run at some moment, in half of the cases at a change of a file."""
    if rng.random() < 0.5:
        return {"change": rng.randint(1, CHANGES[name])}
    return {"kill_after": rng.uniform(0.0, SECONDS[name])}


def fails_once(number: int) -> Callable[[random.Random, str], dict[str, Any]]:
    """Return a maker of faults: one change of a file fails with the error `number`, and no later change fails."""
    return lambda rng, name: {"change": rng.randint(1, CHANGES[name]), "errno": number}


KINDS: dict[str, Callable[[random.Random, str], dict[str, Any]]] = {
    "kill -9": killed,
    "a full disk": lambda rng, name: {"disk": rng.randint(2**12, BYTES[name] * 2 // 3)},
    "a limit of the size of files": lambda rng, name: {"file_size": rng.randint(10, BYTES[name] // 4)},
    "a read-only disk": lambda _draws, _name: {"disk": 0},
    "a disk that becomes read-only": lambda rng, name: {
        "change": rng.randint(1, CHANGES[name]),
        "errno": errno.EROFS,
        "ever": True,
    },
    "no room at one write": fails_once(errno.ENOSPC),
    "an input/output error at one write": fails_once(errno.EIO),
    "a slow disk": lambda rng, name: {"pause": rng.uniform(0.01, 1.0 / CHANGES[name])},
}
FAULTS = [f"sharp {command}: {kind}" for command in CHANGES for kind in KINDS]


def check_command_fault(commands: Commands, fault: str, seed: int) -> bool:
    """Harm a run of a command on the files that earlier runs have left, and return whether the fault happened.

    Raises:
        AssertionError: An invariant does not hold.
    """
    name, kind = fault.removeprefix("sharp ").split(": ", 1)
    harm = KINDS[kind](random.Random(f"{fault} {seed}"), name)
    done = commands.run(name, harm)
    if done.code == 0:  # the fault came after all was written, or the disk was slow
        assert commands.check(name) == commands.right[name], f"{harm}: other weights"
        hit = kind == "a slow disk"
        commands.clear()
        return hit
    if NOT_MOUNTED in done.output:  # only root may mount a disk
        return False
    if kind == "kill -9":
        assert done.code == -9, f"{harm}: {done}"
    else:
        said = [line for line in done.output.splitlines() if line.lower().startswith("error: ")]
        assert done.code == 2 and len(said) == 1 and "Traceback" not in done.output, f"{harm}: {done}"
    assert not commands.exists(name) or commands.check(name), f"{harm}: half a result"
    return True


def check_next_run(commands: Commands, fault: str) -> None:
    """Check that a run on the files that faults have left has the result of a run in an empty folder.

    Raises:
        AssertionError: An invariant does not hold.
    """
    name = fault.removeprefix("sharp ").split(": ", 1)[0]
    if commands.exists(name) and name != "train":  # the complete result was already checked
        commands.clear()
    done = commands.run(name, {})
    assert done.code == 0, done.output
    assert commands.check(name) == commands.right[name], "other weights"
    assert not commands.left(), commands.left()
    commands.clear()


@contextmanager
def commands_in(folder: Path) -> Iterator[Commands]:
    """Yield the commands, with inputs in `folder`."""
    commands = Commands(folder)
    try:
        yield commands
    finally:
        commands.close()


def run_command_faults(
    folder: Path, names: list[str], times: int, report: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    """Inject `times` faults of each name; return how many happened, by name, and which invariants broke.

    The files that a fault leaves are there when the next fault comes.
    """
    counts: Counter[str] = Counter()
    broken: list[str] = []
    with commands_in(folder) as commands:
        for name in names:
            commands.clear()
            for seed in range(times):
                try:
                    counts[name] += check_command_fault(commands, name, seed)
                    if seed % 4 == 3 or seed == times - 1:
                        check_next_run(commands, name)
                except Exception as error:
                    broken.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
                    commands.clear()
            report(f"{counts[name]:6} {name}")
    return counts, broken
