"""Damages files and reads them, and reports each file that a reader neither loads nor refuses in one sentence.

python -m tests.full.fuzz [--reader NAME] [--runs 1000] [--seed 0] [--keep FOLDER]

Every run damages one file and reads it. The file must load, or be refused with a `SharpError` of one line. Another
exception, or a run of more than `SECONDS`, is a finding. The files of findings are kept in `--keep`, and a small file
of the same kind belongs into `hostile.py`. With `--verbose` each run is named before it starts, so that a crash of the
whole process has a name, too.
"""

import hashlib
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from bench.result_file import header, write
from sharp.core.errors import SharpError
from tests.full.fuzz.mutations import mutate
from tests.full.fuzz.readers import READERS, Reader

SECONDS = 20


class HangError(Exception):
    """A reader takes longer than `SECONDS`."""


@dataclass(frozen=True)
class Finding:
    """A file that a reader should have refused in one sentence."""

    reader: str
    content: bytes
    problem: str


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise `HangError` in the block when the block takes more than `SECONDS`."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise HangError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(reader: Reader, folder: Path) -> str | None:
    """Read the file in `folder`; return a problem with how the reading ended, or None."""
    try:
        with time_limit():
            reader.read(folder)
    except SharpError as error:
        return f"a message of several lines: {error}" if "\n" in str(error) else None
    except Exception:
        return traceback.format_exc()
    return None


def fuzz(
    reader: Reader, folder: Path, runs: int, seed: int, on_run: Callable[[int], None] = lambda _run: None
) -> Iterator[Finding]:
    """Damage the sample of `reader` in `folder` in `runs` ways that follow from `seed`."""
    whole = (folder / reader.file).read_bytes()
    for run in range(runs):
        on_run(run)
        content = mutate(whole, random.Random(f"{reader.name} {seed} {run}"))
        (folder / reader.file).write_bytes(content)
        if (problem := check(reader, folder)) is not None:
            yield Finding(reader.name, content, problem)


def store(finding: Finding, keep: Path, suffix: str) -> None:
    """Write the file of a finding to `keep`, named by its content."""
    folder = keep / finding.reader
    folder.mkdir(parents=True, exist_ok=True)
    (folder / (hashlib.sha256(finding.content).hexdigest()[:12] + suffix)).write_bytes(finding.content)


@click.command()
@click.option("--reader", "chosen", type=click.Choice([reader.name for reader in READERS]), multiple=True)
@click.option("--runs", default=1000, help="Files for every reader.")
@click.option("--seed", default=0)
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for the files that were not refused well.")
@click.option("--verbose", is_flag=True, help="Print every run before it starts.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(chosen: tuple[str, ...], runs: int, seed: int, keep: Path | None, verbose: bool, output: Path | None) -> None:
    """Damage files and read them."""
    found, rows, began = 0, [], time.monotonic()
    for reader in READERS:
        if chosen and reader.name not in chosen:
            continue
        problems: set[str] = set()
        with tempfile.TemporaryDirectory() as place:
            reader.make(Path(place))
            on_run = (lambda run, name=reader.name: click.echo(f"{name} {run}")) if verbose else (lambda _run: None)
            for finding in fuzz(reader, Path(place), runs, seed, on_run):
                found += 1
                last = finding.problem.strip().splitlines()[-1]
                if last not in problems:
                    click.echo(f"{finding.reader}: {finding.problem}")
                problems.add(last)
                if keep is not None:
                    store(finding, keep, Path(reader.file).suffix)
        rows.append({"name": reader.name, "files": runs, "findings": sorted(problems)})
        click.echo(f"{reader.name}: {runs} files, {len(problems)} kinds of findings")
    command, seconds = f"python -m tests.full.fuzz --runs {runs} --seed {seed}", round(time.monotonic() - began, 1)
    write(output, {**header("damaged_files"), "command": command, "seconds": seconds, "rows": rows})
    if found:
        raise SystemExit(1)
