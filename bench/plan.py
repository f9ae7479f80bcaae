"""`sharp plan` beside measurements: generated tokens a second of 1, 8 and 64 streams, predicted and measured.

python -m bench.plan FOLDER [--streams 1,8,64] [--rounds 5] [--output bench/results/plan_HOST.json]

The plan gets the speed of one stream only, as `bench.generation` measures it: the tokens a second of decoding, and the
time of a prompt. Each round measures that speed and then every number of streams, so that other work on the machine
slows both. All streams of a number start together, each with a prompt of its own. Their throughput is all generated
tokens over the time until the last token. The prediction is the plan's requests a second at full use, times the tokens
of a completion. "off" is the predicted over the measured throughput, minus 1 (medians over rounds). Target: at most
25 %.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import click

from bench.engine_step import prompt
from bench.interleaving import pause
from bench.result_file import header, write
from sharp import LLM, SamplingParams
from sharp.core.cli import SharpCommand
from sharp.core.machine import available_cpus
from sharp.serving.capacity.plan import UTILIZATION, ExpectedLoad, ModelFacts, make_plan, read_model
from sharp.serving.capacity.speed import Speed
from sharp.serving.config import EngineConfig

TARGET = 0.25
# The lengths of bench.generation, whose figures `sharp plan` reads.
SPEED_PROMPT, SPEED_COMPLETION = 261, 64
MEMORY_BYTES = 1e15  # the batch is the number of streams, whatever the memory


def measure_speed(llm: LLM, model: ModelFacts, number: int) -> Speed:
    """Return the speed of one stream with a prompt of SPEED_PROMPT tokens that no other `number` has."""
    tokens = prompt(SPEED_PROMPT, number, llm.model.manifest.vocab_size)
    (completion,) = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=SPEED_COMPLETION, ignore_eos=True))
    first, total = completion.timing.time_to_first_token, completion.timing.total
    assert first is not None
    decoding = (SPEED_COMPLETION - 1) / (total - first)
    return Speed(
        decoding * model.weight_bytes, 2 * model.weights * SPEED_PROMPT / first, measured=True, origin="bench.plan"
    )


def measure_throughput(llm: LLM, load: ExpectedLoad, number: int) -> float:
    """Return the generated tokens a second of `load.max_sequences` streams that start together.

    The prompts are those of `number` and of the numbers after it, one for each stream.
    """
    length, vocab = load.context - load.completion_tokens, llm.model.manifest.vocab_size
    prompts = [prompt(length, number + stream, vocab) for stream in range(load.max_sequences)]
    params = SamplingParams(temperature=0, max_tokens=load.completion_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params)
    return load.max_sequences * load.completion_tokens / (time.perf_counter() - began)


def predict(model: ModelFacts, load: ExpectedLoad, speed: Speed) -> float:
    """Return the generated tokens a second that the plan expects of a server without idle time."""
    made = make_plan(model, load, MEMORY_BYTES, speed, None)
    return made.requests_per_second / UTILIZATION * load.completion_tokens


@click.command(cls=SharpCommand)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--streams", default="1,8,64", show_default=True, help="Numbers of streams.")
@click.option("--context", default=512, show_default=True, help="Tokens of a request, prompt and completion together.")
@click.option("--completion-tokens", default=128, show_default=True, help="Generated tokens of a request.")
@click.option("--rounds", default=5, show_default=True, help="Measurements of each number.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(folder: Path, streams: str, context: int, completion_tokens: int, rounds: int, output: Path | None) -> None:
    """Compare the plan with measurements, and write the results."""
    loads = [ExpectedLoad(context, completion_tokens, 1.0, int(number)) for number in streams.split(",")]
    model = read_model(folder)
    settings = EngineConfig(
        attention_interval=0,
        prefix_cache=False,
        speculative_tokens=0,
        max_sequences=max(load.max_sequences for load in loads),
        cache_tokens=max(load.max_sequences for load in loads) * (context + 64),
    )
    llm = LLM(str(folder), engine=settings)
    measure_speed(llm, model, 0)  # the first steps take memory from the system
    speeds: list[Speed] = []
    pairs: dict[int, list[tuple[float, float]]] = {load.max_sequences: [] for load in loads}
    for number in range(rounds):
        pause()
        speeds.append(measure_speed(llm, model, 1000 * number + 1))
        for load in loads:
            pause()
            measured = measure_throughput(llm, load, 1000 * number + 2)
            pairs[load.max_sequences].append((predict(model, load, speeds[-1]), measured))
    rows: list[dict[str, Any]] = []
    for count, found in pairs.items():
        off = statistics.median(predicted / measured - 1 for predicted, measured in found)
        row = {
            "streams": count,
            "predicted": round(statistics.median(predicted for predicted, _ in found), 1),
            "measured": round(statistics.median(measured for _, measured in found), 1),
            "off": round(off, 3),
            "holds": abs(off) <= TARGET,
        }
        rows.append(row)
        click.echo(row)
    result: dict[str, Any] = {
        **header("plan"),
        "model": folder.name,
        "threads": available_cpus(),
        "context": context,
        "completion_tokens": completion_tokens,
        "rounds": rounds,
        "bytes_per_second": statistics.median(speed.bytes_per_second for speed in speeds),
        "operations_per_second": statistics.median(speed.operations_per_second for speed in speeds),
        "rows": rows,
    }
    write(output, result)


if __name__ == "__main__":
    main()
