"""Damages files and gives them to the commands that a user would run, and reports how each command failed.

python -m tests.full.fuzz.commands [--kind NAME] [--runs 3000] [--minutes 60] [--seed 0] [--keep FOLDER]

Every run damages one file of a whole sample and runs a command in a process of its own, which is a fork of this one, so
that the imports are paid for once. A traceback, an exit code other than 0, 1 and 2, a run of more than `SECONDS`, or
more than `MOST_BYTES` of memory is a finding. The kinds are run in rotation, so a run that is cut short by `--minutes`
has tried all of them. `python -m tests.full.fuzz` calls the readers of files alone and is many times faster.
"""

import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from bench.result_file import header, write
from sharp.core.checksums import write_manifest
from sharp.core.cli import main as sharp
from sharp.core.manifest import read_manifest
from sharp.models.checkpoint import save_checkpoint
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny
from tests.full.fuzz.mutations import mutate
from tests.full.fuzz.readers import write_gguf, write_model_folder

FORK = multiprocessing.get_context("fork")
SECONDS = 60
MOST_BYTES = 1_500_000_000  # of memory that is resident
MOST_DATA = 6_000_000_000  # a command that needs more gets a MemoryError, and the machine stays usable
TRACEBACK = "Traceback (most recent call last)"
CODES = (0, 1, 2)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of file: `make` writes a whole sample into a folder, `file` is damaged, `arguments` follow `sharp`."""

    name: str
    make: Callable[[Path], object]
    file: str
    arguments: tuple[str, ...]


@dataclass
class Result:
    """The figures of a kind: how many commands ended with each code, and what each finding was."""

    codes: dict[int, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


def write_program(folder: Path) -> None:
    """Write a module with attention as a program of torch.export."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    torch.export.save(torch.export.export(Attention(), (torch.randn(2, 5, 16),)), folder / "tiny.pt2")


def tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of `size` tokens, each of which is a character."""
    return Tokenizer(BPE({chr(33 + number): number for number in range(size)}, []))


def write_llama(folder: Path) -> None:
    """Write a Llama's Hugging Face folder with a tokenizer and a chat template."""
    save(tiny("llama"), folder)
    tokenizer(tiny("llama").config.vocab_size).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def write_exported(folder: Path) -> None:
    """Write an exported folder with a tokenizer and a chat template."""
    write_model_folder(folder)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_manifest(folder / "model", read_manifest(folder / "model"))


EXPORT = ("export", "{file}", "--norm", "softmax", "-o", "{out}")
EXPORT_FOLDER = ("export", "{folder}", "--norm", "softmax", "-o", "{out}")
KINDS = (
    Kind("gguf", write_gguf, "tiny.gguf", EXPORT),
    Kind(
        "safetensors",
        lambda folder: save_checkpoint(folder / "tiny.safetensors", tiny_model("softmax"), torch.float32),
        "tiny.safetensors",
        EXPORT,
    ),
    Kind(
        "pt",
        lambda folder: save_checkpoint(folder / "tiny.pt", tiny_model("softmax"), torch.float32),
        "tiny.pt",
        EXPORT,
    ),
    Kind("pt2", write_program, "tiny.pt2", (*EXPORT, "--cache", "none")),
    Kind("shard", write_llama, "model.safetensors", EXPORT_FOLDER),
    Kind("config", write_llama, "config.json", EXPORT_FOLDER),
    Kind("tokenizer", write_llama, "tokenizer.json", EXPORT_FOLDER),
    Kind("template", write_llama, "chat_template.jinja", EXPORT_FOLDER),
    Kind("manifest", write_exported, "model/sharp.json", ("doctor", "{folder}/model")),
    Kind("graph", write_exported, "model/model.onnx", ("inspect", "{folder}/model", "-o", "{out}")),
)


def run(arguments: Iterable[str], log: Path) -> tuple[int, str | None]:
    """Run `sharp` with `arguments` in a fork; return its exit code, and the problem if it is a finding.

    A command that was ended by a signal has the negative number of the signal.
    """
    child = os.fork()
    if child == 0:
        _command(list(arguments), log)
    deadline, hung = time.monotonic() + SECONDS, False
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if not hung and time.monotonic() > deadline:
            hung = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    output = log.read_text(encoding="utf-8", errors="replace")
    if hung:
        return code, f"more than {SECONDS} s"
    if TRACEBACK in output:
        return code, f"a traceback: {output.strip().splitlines()[-1][:300]}"
    if code not in CODES:
        return code, f"exit code {code}: {output.strip()[-300:]}"
    if usage.ru_maxrss * 1024 > MOST_BYTES:
        return code, f"{usage.ru_maxrss / 1e6:.2f} GB of memory"
    return code, None


def _command(arguments: list[str], log: Path) -> None:
    """Run a command in the child, and end the process."""
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(log.parent)  # a command writes where it runs if its output is not named
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA, MOST_DATA))
        torch.set_num_threads(1)
        try:
            sharp(arguments, prog_name="sharp")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def damage(kind: Kind, sample: Path, work: Path, rng: random.Random) -> bytes:
    """Copy the sample of a kind to `work` with its file damaged, and return the content of the file."""
    shutil.copytree(sample, work)
    content = mutate((sample / kind.file).read_bytes(), rng)
    (work / kind.file).write_bytes(content)
    return content


@click.command()
@click.option("--kind", "chosen", type=click.Choice([kind.name for kind in KINDS]), multiple=True)
@click.option("--runs", default=3000, help="Commands for every kind.")
@click.option("--minutes", default=60.0, help="Stop after this time.")
@click.option("--seed", default=0)
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for the files of findings.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(chosen: tuple[str, ...], runs: int, minutes: float, seed: int, keep: Path | None, output: Path | None) -> None:
    """Damage files and give them to commands."""
    kinds = [kind for kind in KINDS if not chosen or kind.name in chosen]
    results = {kind.name: Result() for kind in kinds}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        samples = {kind.name: root / "samples" / kind.name for kind in kinds}
        for kind in kinds:
            samples[kind.name].mkdir(parents=True)
            # A fork of a process that has computed may wait for ever for threads that it does not have.
            making = FORK.Process(target=kind.make, args=(samples[kind.name],))
            making.start()
            making.join()
        for kind in kinds:  # a sample that is refused as it stands would find nothing
            names = {"file": samples[kind.name] / kind.file, "folder": samples[kind.name], "out": root / "out"}
            code, problem = run((part.format_map(names) for part in kind.arguments), root / "log")
            shutil.rmtree(root / "out", ignore_errors=True)
            if code or problem:
                said = problem or (root / "log").read_text(encoding="utf-8")
                raise click.ClickException(f"the sample of {kind.name} is refused: {said}")
        for number in range(runs):
            for kind in kinds:
                if time.monotonic() - began > 60 * minutes:
                    break
                work, out, log = root / "work", root / "out", root / "log"
                content = damage(kind, samples[kind.name], work, random.Random(f"{kind.name} {seed} {number}"))
                names = {"file": work / kind.file, "folder": work, "out": out}
                code, problem = run((part.format_map(names) for part in kind.arguments), log)
                result = results[kind.name]
                result.codes[code] = result.codes.get(code, 0) + 1
                if problem is not None:
                    click.echo(f"{kind.name} {number}: {problem}")
                    result.findings.append(problem)
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        name = hashlib.sha256(content).hexdigest()[:12]
                        (keep / f"{kind.name}-{name}{Path(kind.file).suffix}").write_bytes(content)
                for path in (work, out):
                    shutil.rmtree(path, ignore_errors=True)
    rows = [{"name": name, "codes": result.codes, "findings": result.findings} for name, result in results.items()]
    for row in rows:
        click.echo(f"{row['name']}: exit codes {row['codes']}, {len(results[str(row['name'])].findings)} findings")
    command = f"python -m tests.full.fuzz.commands --runs {runs} --minutes {minutes:g} --seed {seed}"
    seconds = round(time.monotonic() - began, 1)
    write(output, {**header("damaged_files_commands"), "command": command, "seconds": seconds, "rows": rows})
    if any(result.findings for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
