"""All runs on a GPU in order, each under ten minutes: call it again until it says that everything is done.

python -m bench.gpu.all --output FOLDER [--minutes 9] [--keep-going] [--again RUN]

A call begins no run after `--minutes`, and every run writes its rows as it goes: where a call or the machine ends, the
next call goes on behind the last row. FOLDER/runs.json says how each run ended, FOLDER/*.log what it printed. A wrong
row in a run that must be right stops the others; --keep-going measures them all the same. The exit code is 0 when all
runs have ended well, 1 where one has not, and 75 while some are left.

bench/README.md says what to prepare before, without a GPU.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LEFT = 75  # the exit code while runs are left, EX_TEMPFAIL of sysexits.h
LOST_SECONDS = 60  # a run that takes this much longer than its time is ended


@dataclass(frozen=True)
class Run:
    """One run: a name, what it shows, its minutes and its command, in which {output} and {minutes} are filled in.

    `decides` says that a wrong result of this run stops the runs behind it. `tool` is a program that the run needs, and
    `module` a package; without them the run is left out.
    """

    name: str
    shows: str
    minutes: float
    command: tuple[str, ...]
    decides: bool = False
    tool: str = ""
    module: str = ""

    @property
    def missing(self) -> str:
        """The program or package that the run needs and that is not installed; empty if none."""
        if self.tool and shutil.which(self.tool) is None:
            return self.tool
        return self.module if self.module and find_spec(self.module) is None else ""


def _bench(name: str, shows: str, minutes: float, *arguments: str, decides: bool = False, file: str = "gpu") -> Run:
    """Return a run of `bench.gpu.run` with these arguments, or of `bench.gpu.library` if `file` says so.

    `shows` says what the run measures, `minutes` how long it may take, and `decides` that later runs depend on it.
    """
    module = "bench.gpu.library" if file.startswith("gpu_library") else "bench.gpu.run"
    tail = ("--minutes", "{minutes}", "--output", f"{{output}}/{file}.json", "--resume")
    return Run(name, shows, minutes, (sys.executable, "-m", module, *arguments, *tail), decides)


def _sanitizer(tool: str) -> Run:
    """Return a run of compute-sanitizer over the quick cases; the log has its summary, and errors are the exit code."""
    checked = (sys.executable, "-m", "bench.gpu.run", "--quick", "--only", "correctness", "--minutes", "{minutes}")
    # Torch's own pool is off, because in it a read beyond a tensor is a valid read of its neighbour.
    command = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", tool)
    command += ("--error-exitcode", "9", "--target-processes", "all", *checked)
    output = ("--output", f"{{output}}/{tool}.json", "--resume")
    return Run(tool, f"{tool} over the quick cases", 6, command + output, tool="compute-sanitizer")


PROFILED = (
    *("ncu", "--target-processes", "all", "--kernel-name", "regex:^(decode_stream|prefill)$"),
    *("--launch-skip", "20", "--launch-count", "8", "--section", "SpeedOfLight", "--section", "Occupancy"),
    *("--section", "MemoryWorkloadAnalysis", "--section", "WarpStateStats"),
)

RUNS = (
    _bench("correctness", "every kernel, quick cases", 6, "--quick", "--only", "machine,correctness", decides=True),
    _bench("library", "the compiled library and TensorRT's plugins", 4, "--quick", decides=True, file="gpu_library"),
    Run(
        "doctor",
        "ONNX Runtime and TensorRT as they are installed",
        2,
        (sys.executable, "-c", "from sharp.core.cli import main; main()", "doctor", "--json"),
        module="sharp",
    ),
    _bench("long", "contexts to 131,072, and CUDA graphs", 5, "--only", "long", decides=True),
    _bench("decode", "decode, batch 1 to 32, context 1k to 1M", 8, "--only", "decode"),
    _bench("shapes", "uneven batches, two to four tokens, heads of 64", 6, "--only", "shapes"),
    _bench("prefill", "prompts of 1k to 128k", 8, "--only", "prefill"),
    _bench("statistics", "what statistics cost", 4, "--only", "statistics"),
    _bench("sampling", "tokens from logits", 2, "--only", "sampling"),
    _bench("end-to-end", "a whole model beside torch", 6, "--only", "end-to-end"),
    Run(
        "profile",
        "Nsight Compute's of decode and of prompts; its report is the log",
        3,
        (
            *PROFILED,
            *(sys.executable, "-m", "bench.gpu.run", "--quick", "--only", "prefill", "--minutes", "{minutes}"),
            *("--output", "{output}/profile.json", "--resume"),
        ),
        tool="ncu",
    ),
    _sanitizer("memcheck"),
    _sanitizer("racecheck"),
    _sanitizer("initcheck"),
    _bench("tiles", "other tiles than the kernels' own", 9, "--only", "tiles"),
    _bench(
        "all-correctness", "every kernel, all cases", 9, "--only", "correctness", file="gpu_correctness", decides=True
    ),
    _bench("all-library", "the libraries, all cases", 9, file="gpu_library_all"),
)


def main(arguments: Sequence[str] | None = None, runs: Sequence[Run] = RUNS) -> int:
    """Do what is left of the runs within the time, and return the exit code.

    The code is 0 if all runs have ended well (or were left out), 1 if one has not, and 75 while some are left.
    """
    described = "\n".join(f"  {run.name:16} {run.minutes:g} min  {run.shows}" for run in runs)
    parser = argparse.ArgumentParser(
        description="All runs of the GPU benchmark, in order.",
        epilog=f"runs:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="time after which no run is begun")
    parser.add_argument("--keep-going", action="store_true", help="go on behind a run that found something wrong")
    parser.add_argument("--again", action="append", default=[], metavar="RUN", help="repeat a run that has ended")
    chosen = parser.parse_args(arguments)
    if unknown := sorted({*chosen.again} - {run.name for run in runs}):
        parser.error(f"--again names {unknown[0]!r}; the runs are {', '.join(run.name for run in runs)}")
    chosen.output.mkdir(parents=True, exist_ok=True)
    state = State(chosen.output / "runs.json")
    state.forget(chosen.again)
    end = time.monotonic() + 60 * chosen.minutes
    for run in runs:
        while run.name not in state.ended and (left := end - time.monotonic()) > 0:
            perform(run, chosen.output, min(60 * run.minutes, left), state)
        if run.name not in state.ended:
            break
        if run.decides and state.ended[run.name] != "0" and not chosen.keep_going:
            print(f"{run.name} found something wrong: {chosen.output / run.name}.log says what; --keep-going goes on")
            return 1
    rest = [run.name for run in runs if run.name not in state.ended]
    failed = [name for name, code in state.ended.items() if code not in ("0", "left out")]
    print(f"{len(state.ended)} of {len(runs)} runs have ended; left: {', '.join(rest) or 'none'}")
    if rest:
        print(f"call it again with --output {chosen.output}")
        return LEFT
    print(f"failed: {', '.join(failed) or 'none'}; results in {chosen.output}")
    return 1 if failed else 0


class State:
    """The ends of runs, kept in a file: an exit code, or "left out"."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ended: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def forget(self, names: Sequence[str]) -> None:
        """Forget how these runs ended, so that they are repeated; the file changes with the next `note`."""
        self.ended = {name: code for name, code in self.ended.items() if name not in names}

    def note(self, name: str, code: str) -> None:
        """Record the code with which the run `name` ended, in memory and in the state's file."""
        self.ended[name] = code
        new = self._path.with_suffix(".new")  # replaced in one piece, because the machine may be taken back meanwhile
        new.write_text(json.dumps(self.ended, indent=1) + "\n", encoding="utf-8")
        new.replace(self._path)


def perform(run: Run, output: Path, seconds: float, state: State) -> None:
    """Do a run for up to `seconds`, or go on with it, and note its end in `state`.

    A run has ended when it has all rows, or adds none in all of its minutes; otherwise nothing is noted. Exit code 124
    means that it was killed a minute after its time.
    """
    print(f"{run.name}: {run.shows}", flush=True)
    if run.missing:
        print(f"  left out: {run.missing} is not installed", flush=True)
        state.note(run.name, "left out")
        return
    minutes = f"{seconds / 60:.2f}"
    command = [part.replace("{output}", str(output)).replace("{minutes}", minutes) for part in run.command]
    before, began = rows_of(command), time.monotonic()
    with (output / f"{run.name}.log").open("a", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=seconds + LOST_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    cut_short = seconds < 60 * run.minutes and time.monotonic() - began >= seconds
    if not is_complete(command) and (cut_short or rows_of(command) > before):
        print("  its time is over; it goes on behind its last row", flush=True)
        return
    state.note(run.name, str(code))
    print(f"  ended with code {code}", flush=True)


def results_of(command: Sequence[str]) -> dict[str, Any]:
    """Return the content of the results file that a command's --output names; empty if there is none."""
    path = Path(command[command.index("--output") + 1]) if "--output" in command else Path()
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def parts_of(command: Sequence[str]) -> list[dict[str, Any]]:
    """Return the parts of a command's results file, one for each section of --only; without --only, all as one part."""
    results = results_of(command)
    if "--only" not in command:
        return [results]
    return [results.get(section, {}) for section in command[command.index("--only") + 1].split(",")]


def rows_of(command: Sequence[str]) -> int:
    """Return the number of rows in a command's results file."""
    return sum(len(part.get("rows", ())) for part in parts_of(command))


def is_complete(command: Sequence[str]) -> bool:
    """Whether a command's results file has all rows; also true if the command writes no file."""
    return "--output" not in command or all(part.get("complete") for part in parts_of(command))


if __name__ == "__main__":
    sys.exit(main())
