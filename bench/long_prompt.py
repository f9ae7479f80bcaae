"""Peak memory and time of one long prompt through a model folder, one fresh process per length.

python -m bench.long_prompt FOLDER [--lengths 4096,8192,16384,32768] [--output bench/results/long_prompt.json]

"extra_mb" is the peak resident memory minus what the process held once the model was loaded and had completed a short
prompt: what the long prompt itself takes, with its key-value cache ("cache_mb"). It must grow linearly with the length.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import click

from bench.result_file import header, write
from sharp.core.cli import SharpCommand


def resident_mb() -> float:
    """Return the resident memory now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measure(folder: str, length: int) -> dict[str, float]:
    """Run one prompt of `length` tokens in this process, which must be a new one.

    The entries are tokens, seconds, before_mb (resident once the model has completed a short prompt) and extra_mb (the
    peak above that).
    """
    from sharp import LLM, SamplingParams
    from sharp.serving.config import EngineConfig

    llm = LLM(folder, engine=EngineConfig(cache_tokens=length + 16, attention_interval=0))
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))
    before = resident_mb()
    tokens = [32 + (7 * i * i + 3 * i) % 90 for i in range(length)]
    began = time.perf_counter()
    llm.generate([tokens], SamplingParams(temperature=0, max_tokens=1))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {
        "tokens": length,
        "seconds": round(seconds, 2),
        "before_mb": round(before),
        "extra_mb": round(peak - before),
    }


@click.command(cls=SharpCommand)
@click.argument("folder")
@click.option("--lengths", default="4096,8192,16384,32768", show_default=True, help="Prompt lengths in tokens.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
@click.option("--one", type=int, hidden=True)
def main(folder: str, lengths: str, output: Path | None, one: int | None) -> None:
    """Measure seconds and memory of prompts of several lengths, each in a process of its own."""
    if one:
        click.echo(json.dumps(measure(folder, one)))
        return
    rows = []
    for length in map(int, lengths.split(",")):
        command = [sys.executable, "-m", "bench.long_prompt", folder, "--one", str(length)]
        rows.append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
        click.echo(rows[-1])
    result = {
        **header("long_prompt"),
        "model": Path(folder).name,
        "rows": rows,
    }
    write(output, result)


if __name__ == "__main__":
    main()
