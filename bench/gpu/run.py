"""The Triton kernels on a GPU: correctness in every dtype, then speed beside peers and the machine's own limits.

python -m bench.gpu.run [--quick] [--only machine,correctness] [--minutes 9] [--output FILE] [--resume]

Needs torch, triton and this tree; Sharp need not be installed. The section end-to-end also needs onnxruntime-gpu, the
compiled libraries (--libraries) and an exported model (--model, made by bench.gpu.generation); without them it says so
and goes on. Each section replaces its own part of the results, so sections can run in separate calls. A section that
runs out of time keeps its rows and says so; with --resume another call goes on behind them, and leaves out sections
that are complete. Each section has a process of its own. If a case ends that process, another
continues with the next case, and the results have a row with the error. The exit code is 1 where a result is wrong or a
case has failed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gpu.cases import Cases

SECTIONS = {
    "machine": "copy bandwidth and matrix products",
    "correctness": "every kernel against float64",
    "long": "contexts to 131,072 against float64; the same bits again, and in a CUDA graph",
    "decode": "one token a sequence, batch 1 to 32, context 1k to 1M",
    "shapes": "decode of uneven batches, of two to four tokens, and of heads of 64",
    "prefill": "prompts of 1k to 128k",
    "statistics": "what collect_stats costs",
    "sampling": "tokens from logits",
    "end-to-end": "a whole model in ONNX Runtime's CUDA provider beside torch, tokens a second",
    "tiles": "other sizes of tiles than the kernels' own",
}
GRACE_SECONDS = 30  # for a case that was begun in time
LOST = 3  # the exit code of a section's process when the GPU takes no more work from it
MODULE = "bench.gpu.run"  # the module that a section's process runs
RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu.json"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's options; `only` becomes the list of sections in their own order.

    `arguments` None means those of the process. Wrong options end the process with code 2.
    """
    described = "\n".join(f"  {name:12} {what}" for name, what in SECTIONS.items())
    parser = argparse.ArgumentParser(
        description="Correctness and speed of the Triton kernels on a GPU.",
        epilog=f"sections:\n{described}\n\n'tiles' runs only where --only names it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and sizes")
    parser.add_argument("--only", default=",".join(list(SECTIONS)[:-1]), help="sections, separated by commas")
    parser.add_argument("--minutes", type=float, default=9.0, help="time after which nothing new is begun")
    parser.add_argument("--model", type=Path, default=Path("build/gpu-model"), help="for end-to-end: exported folder")
    parser.add_argument("--libraries", type=Path, default=Path("build/gpu"), help="for end-to-end: folder of ours")
    parser.add_argument("--output", type=Path, default=RESULTS, help="results file that the sections are merged into")
    parser.add_argument("--resume", action="store_true", help="go on behind the rows that the results file has")
    parser.add_argument("--behind", type=int, help=argparse.SUPPRESS)  # for a section's own process: cases left out
    chosen = parser.parse_args(arguments)
    named = chosen.only.split(",")
    if unknown := [name for name in named if name not in SECTIONS]:
        parser.error(f"--only names {unknown[0]!r}; the sections are {', '.join(SECTIONS)}")
    if not chosen.minutes > 0:
        parser.error(f"--minutes is {chosen.minutes}; it must be above 0")
    chosen.only = [name for name in SECTIONS if name in named]
    return chosen


def merge_results(path: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """Replace these sections in the results file, write it, and return all results."""
    merged: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    merged.update(sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")  # replaced in one piece, because the process may be killed while it writes
    new.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
    return merged


def rows_of(section: str, chosen: argparse.Namespace, cases: "Cases") -> Iterator[dict[str, Any]]:
    """Yield the section's results, one row at a time."""
    from bench.gpu import attention, compilation, correctness, generation, sampling, shapes, speed, tiles

    quick = chosen.quick
    match section:
        case "machine":
            yield from speed.machine(cases)
        case "correctness":
            executor, capability = compilation.processes(), compilation.capability()
            try:
                yield from correctness.check_small(quick, executor, capability, cases)
                yield from attention.check(quick, executor, capability, cases)
            finally:
                executor.shutdown(wait=False, cancel_futures=True)
        case "long":
            executor = compilation.processes()
            try:
                yield from correctness.check_large(executor, compilation.capability(), cases)
            finally:
                executor.shutdown(wait=False, cancel_futures=True)
        case "decode":
            compilation.compile_ahead(speed.jobs(section), chosen.minutes)
            yield from speed.decode(quick, cases)
        case "shapes":
            compilation.compile_ahead(shapes.jobs(), chosen.minutes)
            yield from shapes.shapes(quick, cases)
        case "prefill":
            compilation.compile_ahead(speed.jobs(section), chosen.minutes)
            yield from speed.prefill(quick, cases)
        case "statistics":
            compilation.compile_ahead(speed.jobs(section), chosen.minutes)
            yield from speed.statistics_cost(cases)
        case "sampling":
            yield from sampling.sampling(quick, cases)
        case "end-to-end":
            if missing := generation.missing(chosen.model, chosen.libraries):
                yield {"skipped": missing}
                return
            yield from generation.end_to_end(quick, cases, chosen.model, chosen.libraries)
        case _:
            compilation.compile_ahead(tiles.jobs(), chosen.minutes)
            yield from tiles.tiles(cases)


def device() -> dict[str, Any]:
    """Return the device and the versions with which the numbers were taken."""
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def show(row: dict[str, Any]) -> str:
    """Return one line of the row, with numbers to four digits."""
    return "  " + "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


def run_section(section: str, chosen: argparse.Namespace) -> int:
    """Measure a section in this process, behind the cases done before, and write its rows to the results file.

    The file has a part for the section already (`watch_section` makes it). Return `LOST` (3) if the GPU takes no more
    work from this process, otherwise 0.
    """
    from bench.gpu.cases import Cases, DeviceLostError

    end = time.monotonic() + 60 * chosen.minutes
    part = json.loads(chosen.output.read_text(encoding="utf-8"))[section]
    part |= device()

    def save(**changes: Any) -> None:  # after every row, because the machine may be taken back
        """Update the section in the results file."""
        part.update(changes)
        merge_results(chosen.output, {section: part})

    cases = Cases(
        lambda: time.monotonic() < end,
        chosen.behind,
        lambda number: save(begun=number),
        lambda number: save(done=number, rows_done=len(part["rows"])),
    )
    try:
        for row in rows_of(section, chosen, cases):
            part["rows"].append(row)
            print(show(row), flush=True)
            save()
    except DeviceLostError as error:
        print(f"  the GPU takes no more work from this process: {error}", flush=True)
        return LOST
    save(ended=True, complete=cases.complete)
    return 0


def earlier_part(section: str, chosen: argparse.Namespace) -> dict[str, Any] | None:
    """Return an earlier call's results of the section on such a device and with the same --quick; None without any."""
    results = json.loads(chosen.output.read_text(encoding="utf-8")) if chosen.output.is_file() else {}
    part: dict[str, Any] | None = results.get(section)
    if part is None or part["quick"] != chosen.quick or "done" not in part:
        return None
    return part if part.get("device") == device().get("device") else None


def watch_section(section: str, chosen: argparse.Namespace, end: float) -> None:
    """Measure a section in processes of its own, until its cases are done or the time is over.

    `end` is a time of `time.monotonic`. Rows are written to the results file as they come. A process that ends by
    itself leaves a row with an error, and another goes on with the next case.
    """
    part = earlier_part(section, chosen) if chosen.resume else None
    if part is None:
        part = {"quick": chosen.quick, "complete": False, "ended": False, "done": 0, "rows_done": 0, "rows": []}
    elif part["ended"] and part["complete"]:
        print("  complete already", flush=True)
        return
    begun = part["done"]  # so that a case that ran when the machine was lost is measured again
    part |= {"ended": False, "complete": False, "begun": begun, "rows": part["rows"][: part["rows_done"]]}
    merge_results(chosen.output, {section: part})
    while not part["ended"] and (left := end - time.monotonic()) > 0:
        command = [sys.executable, "-m", MODULE, "--only", section, "--behind", str(begun), "--minutes", str(left / 60)]
        command += ["--output", chosen.output, "--model", chosen.model, "--libraries", chosen.libraries]
        command += ["--quick"] * chosen.quick
        try:
            code = subprocess.run(command, check=False, timeout=left + GRACE_SECONDS).returncode
            said = f"its process ended with code {code}; the output above says more"
        except subprocess.TimeoutExpired:  # the next call will measure the case again
            print("  a case was still running when the time was over", flush=True)
            return
        before, part = begun, json.loads(chosen.output.read_text(encoding="utf-8"))[section]
        begun = part["begun"]
        if not part["ended"] and code != LOST:
            part["rows"].append({"case": begun, "error": said})
            part |= {"done": begun, "rows_done": len(part["rows"])}
            merge_results(chosen.output, {section: part})
            print(show(part["rows"][-1]), flush=True)
        if begun == before:  # the process ended before any case, and so would the next one
            return


def main() -> int:
    """Run the chosen sections; return 1 if a result is wrong or a case failed, 2 without a GPU, otherwise 0.

    Sections for which there was no time do not change the code. In a section's own process (--behind), return the code
    of `run_section`.
    """
    chosen = parse()
    import torch

    if not torch.cuda.is_available():
        print("bench.gpu.run: torch finds no CUDA device; run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    if chosen.behind is not None:
        return run_section(chosen.only[0], chosen)
    end = time.monotonic() + 60 * chosen.minutes
    for section in chosen.only:
        print(f"{section}: {SECTIONS[section]}", flush=True)
        watch_section(section, chosen, end)
        if time.monotonic() > end:
            print(f"  stopped: {chosen.minutes:g} minutes are over", flush=True)
            break
    from bench.gpu.targets import targets

    merged = json.loads(chosen.output.read_text(encoding="utf-8"))
    for target in targets(merged):
        print(show(target))
    rows = [row for section in chosen.only for row in merged.get(section, {"rows": []})["rows"]]
    wrong, failed = sum(row.get("holds") is False for row in rows), sum("error" in row for row in rows)
    print(f"{wrong} wrong results, {failed} errors; written to {chosen.output}")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
