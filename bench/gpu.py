"""The Triton kernels on a GPU: correctness in every dtype, then speed beside peers and the machine's own limits.

python bench/gpu.py [--quick] [--only machine,correctness] [--minutes 9] [--output FILE]

Needs torch, triton and this tree, no install. The section end-to-end also needs onnxruntime-gpu, the compiled libraries
(--libraries) and an exported model (--model, which gpu_generation.py makes); without them it says so and goes on. Each
section replaces its own part of the results, so that sections can be run apart where a machine is lent for minutes; a
section that runs out of time keeps what it has and says so. The exit code is 1 where a result is wrong.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SECTIONS = {
    "machine": "copy bandwidth and matrix products",
    "correctness": "every kernel against float64",
    "decode": "one token a sequence, batch 1 to 32, context 1k to 1M",
    "prefill": "prompts of 1k to 128k",
    "statistics": "what collect_stats costs",
    "end-to-end": "a whole model in ONNX Runtime's CUDA provider beside torch, tokens a second",
    "tiles": "other sizes of tiles than the kernels' own",
}
RESULTS = Path(__file__).resolve().parent / "results" / "gpu.json"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `only` becomes the list of sections in their own order."""
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
    chosen = parser.parse_args(arguments)
    wanted = chosen.only.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        parser.error(f"--only names {unknown[0]!r}; the sections are {', '.join(SECTIONS)}")
    if not chosen.minutes > 0:
        parser.error(f"--minutes is {chosen.minutes}; it must be above 0")
    chosen.only = [name for name in SECTIONS if name in wanted]
    return chosen


def merge_results(path: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """The results file with these sections in place of those of the same name; written, and returned."""
    merged: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    merged.update(sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    return merged


def rows_of(section: str, chosen: argparse.Namespace, timely: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """The section's results, one row at a time."""
    import gpu_correctness
    import gpu_generation
    import gpu_speed
    import gpu_tiles
    import torch

    quick = chosen.quick
    match section:
        case "machine":
            yield from gpu_speed.machine()
        case "correctness":
            capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
            workers = max(1, (os.cpu_count() or 2) - 1)
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as executor:
                yield from gpu_correctness.check_small(quick, executor, capability)
            yield from gpu_correctness.check_large()
        case "decode":
            yield from gpu_speed.decode(quick, timely)
        case "prefill":
            yield from gpu_speed.prefill(quick, timely)
        case "statistics":
            yield from gpu_speed.statistics_cost(timely)
        case "end-to-end":
            yield from gpu_generation.end_to_end(quick, timely, chosen.model, chosen.libraries)
        case _:
            yield from gpu_tiles.tiles(timely)


def device() -> dict[str, Any]:
    """What the numbers were taken on."""
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
    """One line of the row, numbers to four digits."""
    return "  " + "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


def main() -> int:
    """Run the chosen sections; 1 if a result is wrong."""
    chosen = parse()
    import torch

    if not torch.cuda.is_available():
        print("gpu.py: torch finds no CUDA device; run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * chosen.minutes

    def timely() -> bool:
        return time.monotonic() < end

    wrong, merged = 0, {}
    for section in chosen.only:
        print(f"{section}: {SECTIONS[section]}", flush=True)
        rows = []
        for row in rows_of(section, chosen, timely):
            rows.append(row)
            print(show(row), flush=True)
            wrong += row.get("holds") is False
            part = {**device(), "quick": chosen.quick, "complete": False, "rows": rows}
            merged = merge_results(chosen.output, {section: part})  # after every row: the machine may be taken back
        part = {**device(), "quick": chosen.quick, "complete": timely(), "rows": rows}
        merged = merge_results(chosen.output, {section: part})
        if not timely():
            print(f"  stopped: {chosen.minutes:g} minutes are over", flush=True)
            break
    from gpu_bars import bars

    for bar in bars(merged):
        print(show(bar))
    print(f"{wrong} wrong results; written to {chosen.output}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
