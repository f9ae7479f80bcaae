"""Fuzzes all targets by coverage, one after another: `make fuzz`, FUZZ="--minutes 60 --output FILE".

Inputs that run new code are kept in `--corpus`, from run to run; those of the repository are read, too. A finding ends
its target: the input lies beside the corpus. libFuzzer's targets run once for every instruction set of this machine.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bench.result_file import header, write
from tests.full.fuzz.native.build import ROOT, build_fuzzers, clang
from tests.full.fuzz.targets import CORPUS, makers

OPTIONS = ("-max_len=4096", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1", "-verbosity=1")
INSTRUCTION_SETS = ("avx512_vnni", "avx512", "avx2", "baseline", "amx", "neon")
NATIVE_SHARE = 0.5  # of the time
START_SECONDS = 120  # that a process may take beside its time
PACKAGES = ("sharp-attention", "onnxruntime", "numpy", "atheris")


@dataclass(frozen=True)
class Row:
    """What one run did."""

    name: str
    by: str
    executions: int
    seconds: float
    edges: int
    inputs: int
    findings: list[str]


@dataclass(frozen=True)
class Run:
    """A command that fuzzes, for some seconds."""

    name: str
    by: str
    command: Sequence[str | Path]
    environment: dict[str, str]


def native_runs(build: Path) -> Iterator[Run]:
    """The targets in C++; none without clang."""
    compiler = clang()
    if compiler is None:
        click.echo("clang is missing: the kernels and the sampler are left out")
        return
    for name, program in build_fuzzers(compiler, build).items():
        for instructions in INSTRUCTION_SETS:
            environment = {"SHARP_ISA": instructions, "ASAN_OPTIONS": "allocator_may_return_null=1"}
            probe = [program, "-runs=1"]
            if subprocess.run(probe, env={**os.environ, **environment}, capture_output=True, check=False).returncode:
                continue
            yield Run(f"native-{name}", f"libFuzzer, {instructions}", [program], environment)


def python_runs() -> Iterator[Run]:
    """The targets in Python."""
    for name in makers():
        yield Run(name, "Atheris", [sys.executable, "-m", "tests.full.fuzz.covered", name], {})


def fuzz(run: Run, seconds: int, corpus: Path, kept: Path) -> Row:
    """Fuzz for some seconds, or until a finding."""
    folder = corpus / run.name
    folder.mkdir(parents=True, exist_ok=True)
    folders = [folder, *([kept / run.name] if (kept / run.name).is_dir() else [])]
    found = f"-artifact_prefix={corpus}/{run.name}-"
    command = [*run.command, *OPTIONS, f"-max_total_time={seconds}", found, *folders]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [str(part) for part in command],
            env={**os.environ, **run.environment},
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


def last_number(pattern: str, log: str) -> int:
    """The last number of this pattern; 0 without one."""
    found = re.findall(pattern, log)
    return int(found[-1]) if found else 0


def what_was_found(log: str) -> str:
    """The lines of a log that say what went wrong."""
    lines = [line for line in log.splitlines() if re.search(r"FINDING|SUMMARY|Error|Exception|ALARM", line)]
    return " | ".join(line.strip()[:300] for line in lines[-4:]) or "the process ended"


@click.command()
@click.option("--minutes", default=60.0, help="All targets together.")
@click.option("--target", "chosen", multiple=True, help="Some of the targets; native-... are those in C++.")
@click.option("--corpus", type=click.Path(path_type=Path), default=ROOT / "build/fuzz/corpus")
@click.option("--build", type=click.Path(path_type=Path), default=ROOT / "build/fuzz")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(minutes: float, chosen: tuple[str, ...], corpus: Path, build: Path, output: Path | None) -> None:
    """Fuzz all targets by coverage."""
    native = [run for run in native_runs(build) if not chosen or run.name in chosen]
    python = [run for run in python_runs() if not chosen or run.name in chosen]
    shares = [(run, NATIVE_SHARE if python else 1, len(native)) for run in native]
    shares += [(run, 1 - NATIVE_SHARE if native else 1, len(python)) for run in python]
    rows: list[Row] = []
    for run, share, count in shares:
        row = fuzz(run, max(1, round(minutes * 60 * share / count)), corpus.resolve(), CORPUS)
        rows.append(row)
        click.echo(
            f"{row.name} ({row.by}): {row.executions} in {row.seconds} s, {row.edges} edges {row.findings or ''}"
        )
    result = {
        **header("fuzz", PACKAGES),
        "command": f"python -m tests.full.fuzz.long --minutes {minutes:g}",
        "executions": sum(row.executions for row in rows),
        "findings": sum(len(row.findings) for row in rows),
        "rows": [asdict(row) for row in rows],
    }
    write(output, result)
    click.echo(f"{result['executions']} executions, {result['findings']} findings")
    raise SystemExit(1 if result["findings"] else 0)


if __name__ == "__main__":
    main()
