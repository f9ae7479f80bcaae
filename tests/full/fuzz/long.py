"""Fuzzes all targets by coverage, one after another: `make fuzz`, FUZZ="--minutes 60 --output FILE".

Inputs that run new code are kept in `--corpus` from run to run, and the inputs in the repository are read, too. A
finding ends its target, and its input lies beside the corpus. The targets in C++ run once for every instruction set of
this machine.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import click

from bench.result_file import header, write
from tests.full.fuzz.keeping import few_of
from tests.full.fuzz.native.build import ROOT, build_fuzzers, clang
from tests.full.fuzz.targets import keep, kept_inputs, maker, makers, write_inputs

OPTIONS = ("-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1", "-verbosity=1")
INSTRUCTION_SETS = ("avx512_vnni", "avx512", "avx2", "baseline", "amx", "neon_dotprod", "neon")
NATIVE = "native-"
NATIVE_SHARE = 0.5  # share of the time
MOST_BYTES = 24_000  # limit of a target's inputs in the repository
START_SECONDS = 120  # time that a process may take beside its fuzzing
PACKAGES = ("sharp-attention", "onnxruntime", "numpy", "atheris")


@dataclass(frozen=True)
class Row:
    """The figures of one run."""

    name: str
    by: str
    executions: int
    seconds: float
    edges: int
    inputs: int
    findings: list[str]


@dataclass(frozen=True)
class Run:
    """A command that fuzzes a target for some seconds."""

    name: str
    by: str
    command: Sequence[str | Path]
    environment: dict[str, str]


def native_runs(build: Path) -> Iterator[Run]:
    """Yield the runs of the targets in C++, or none without clang."""
    compiler = clang()
    if compiler is None:
        click.echo("clang is missing: the kernels and the sampler are left out")
        return
    for name, program in build_fuzzers(compiler, build).items():
        for instructions in INSTRUCTION_SETS:
            environment = {"SHARP_ISA": instructions, "ASAN_OPTIONS": "malloc_context_size=2:quarantine_size_mb=8"}
            probe = [program, "-runs=1"]
            if subprocess.run(probe, env={**os.environ, **environment}, capture_output=True, check=False).returncode:
                continue
            yield Run(
                f"{NATIVE}{name}", f"libFuzzer, {instructions}", [program, "-entropic=0", "-max_len=4096"], environment
            )


def python_runs() -> Iterator[Run]:
    """Yield the runs of the targets in Python."""
    for name in makers():
        yield Run(name, "Atheris", [sys.executable, "-m", "tests.full.fuzz.covered", name], {})


def fuzz(run: Run, seconds: int, corpus: Path) -> Row:
    """Fuzz for some seconds, or until a finding."""
    folder, kept = corpus / run.name, corpus / "kept" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(kept_inputs(run.name), kept)
    found = f"-artifact_prefix={corpus}/{run.name}-"
    command = [*run.command, *OPTIONS, f"-max_total_time={seconds}", found, folder, kept]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as place:
        try:
            ended = subprocess.run(
                [str(part) for part in command],
                env={**os.environ, **run.environment, "TMPDIR": place},
                cwd=ROOT,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds + START_SECONDS,
                check=False,
            )
            log, code = ended.stdout + ended.stderr, ended.returncode
        except subprocess.TimeoutExpired as error:
            log, code = (error.stderr or b"").decode(errors="replace"), -1
    return Row(
        run.name,
        run.by,
        executions=last_number(r"number_of_executed_units: (\d+)", log),
        seconds=round(time.monotonic() - began, 1),
        edges=last_number(r" cov: (\d+)", log),
        inputs=sum(1 for _ in folder.iterdir()),
        findings=[] if code == 0 else [what_was_found(log)],
    )


def memory_folder() -> str | None:
    """Return a folder in memory, or None if the machine has none."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def damaged_files(file: Path) -> Row:
    """Return the figures of `python -m tests.full.fuzz` as a row."""
    figures = json.loads(file.read_text(encoding="utf-8"))
    rows, options = figures["rows"], figures["command"].partition("fuzz ")[2]
    return Row(
        name=f"files of {len(rows)} readers",
        by=f"random damage, {options}",
        executions=sum(row["files"] for row in rows),
        seconds=figures.get("seconds", 0.0),
        edges=0,
        inputs=0,
        findings=[finding for row in rows for finding in row["findings"]],
    )


def keep_few(run: Run, corpus: Path) -> None:
    """Keep a few inputs of a target in the repository, small ones first, which run all that its corpus runs.

    Inputs beyond `MOST_BYTES` together are left out.
    """
    with tempfile.TemporaryDirectory() as place:
        if run.name.startswith(NATIVE):
            # Without counters an edge that runs twice counts as an edge that runs once.
            options = ("-set_cover_merge=1", "-use_counters=0", place, str(corpus / run.name))
            environment = {**os.environ, **run.environment}
            subprocess.run([str(part) for part in (*run.command, *options)], env=environment, cwd=ROOT, check=True)
            found = sorted((path.read_bytes() for path in Path(place).iterdir()), key=len)
        else:
            inputs = [path.read_bytes() for path in (corpus / run.name).iterdir()]
            found = few_of(maker(run.name)(Path(place)), inputs)
    sizes = list(accumulate(len(content) * 4 // 3 + 5 for content in found))
    keep(run.name, found[: bisect(sizes, MOST_BYTES)])


def last_number(pattern: str, log: str) -> int:
    """Return the last number that `pattern` finds in a log, or 0."""
    found = re.findall(pattern, log)
    return int(found[-1]) if found else 0


def what_was_found(log: str) -> str:
    """Return the lines of a log that say what went wrong."""
    lines = [line for line in log.splitlines() if re.search(r"FINDING|SUMMARY|Error|Exception|ALARM", line)]
    return " | ".join(line.strip()[:300] for line in lines[-4:]) or "the process ended"


@click.command()
@click.option("--minutes", default=60.0, help="All targets together.")
@click.option("--target", "chosen", multiple=True, help="Some of the targets; native-... are those in C++.")
@click.option("--corpus", type=click.Path(path_type=Path), default=ROOT / "build/fuzz/corpus")
@click.option("--build", type=click.Path(path_type=Path), default=ROOT / "build/fuzz")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
@click.option(
    "--damaged",
    type=click.Path(path_type=Path),
    help="Figures of `python -m tests.full.fuzz --output FILE`, to be archived as one more target.",
)
@click.option(
    "--keep", "keeps", is_flag=True, help="Do not fuzz: put the few inputs that run most into the repository."
)
def main(
    minutes: float,
    chosen: tuple[str, ...],
    corpus: Path,
    build: Path,
    output: Path | None,
    damaged: Path | None,
    *,
    keeps: bool,
) -> None:
    """Fuzz all targets by coverage."""
    compiled = not chosen or any(name.startswith(NATIVE) for name in chosen)  # the other targets need no compiler
    native = [run for run in (native_runs(build) if compiled else ()) if not chosen or run.name in chosen]
    python = [run for run in python_runs() if not chosen or run.name in chosen]
    if keeps:
        for run in {run.name: run for run in (*native, *python)}.values():
            keep_few(run, corpus.resolve())
        return
    share = NATIVE_SHARE if native and python else 1.0 if native else 0.0
    shares = [(run, (1 - share) / len(python)) for run in python] + [(run, share / len(native)) for run in native]
    rows: list[Row] = [] if damaged is None else [damaged_files(damaged)]
    for run, part in shares:
        row = fuzz(run, max(1, round(minutes * 60 * part)), corpus.resolve())
        rows.append(row)
        click.echo(
            f"{row.name} ({row.by}): {row.executions} in {row.seconds} s, {row.edges} edges {row.findings or ''}"
        )
        write(output, result_of(rows, minutes, chosen))
    click.echo(f"{sum(row.executions for row in rows)} executions")
    raise SystemExit(1 if any(row.findings for row in rows) else 0)


def result_of(rows: Sequence[Row], minutes: float, chosen: Sequence[str]) -> dict[str, Any]:
    """Return the figures in the form that is archived."""
    options = "".join(f" --target {name}" for name in chosen)
    return {
        **header("fuzz", PACKAGES),
        "command": f"python -m tests.full.fuzz.long --minutes {minutes:g}{options}",
        "executions": sum(row.executions for row in rows),
        "findings": sum(len(row.findings) for row in rows),
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    main()
