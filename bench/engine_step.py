"""The time that the engine adds to the model's own in a decoding step, and the time that the prefix cache saves.

python -m bench.engine_step FOLDER [--streams 16] [--output bench/results/engine_step.json]

"engine_ms" is the processor time of the engine's thread outside the model, the median over steps in which `streams`
requests each get one token; "step_ms" is the whole step by the clock. "times_one_stream" is the throughput of `streams`
greedy streams over that of a single one, whose step takes "one_stream_ms". "first_token_s" is for a new prompt, and
"shared_first_token_s" for another prompt that shares all but its last token.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import click

from bench.result_file import header, write
from sharp import LLM, SamplingParams
from sharp.core.cli import SharpCommand
from sharp.serving.api.request import GenerateRequest
from sharp.serving.backends import StepInputs, StepOutput
from sharp.serving.config import EngineConfig

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.95, "temperature": 0.8},
    "min_p": {"min_p": 0.05},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0, "logprobs": 5},
}
PROMPT_TOKENS = 64


def prompt(length: int, number: int, vocab: int) -> list[int]:
    """Return `length` token ids below `vocab`, which prompts of other numbers do not begin with."""
    return [3 + (7 * i * i + 3 * i + 101 * number) % (vocab - 3) for i in range(length)]


def measure_steps(llm: LLM, streams: int, steps: int, params: dict[str, Any]) -> dict[str, float]:
    """Return medians over the steps in which every stream decodes: engine_ms and step_ms.

    engine_ms is the processor time of the engine outside the model, step_ms the time of the whole step, both in
    milliseconds. Every stream generates `steps` + 8 tokens with `params` of `SamplingParams`.
    """
    engine = llm._engine
    sampling = SamplingParams(seed=0, max_tokens=steps + 8, ignore_eos=True, **params)
    for number in range(streams):
        tokens = prompt(PROMPT_TOKENS, number, llm.model.manifest.vocab_size)
        engine.add(llm.model.prepare(GenerateRequest(tokens, sampling)))
    backend = engine._backend
    in_model = 0.0

    def timed(batch: StepInputs) -> StepOutput:
        """Run the backend's step and keep its processor time."""
        nonlocal in_model
        began = time.thread_time()
        output = type(backend).step(backend, batch)
        in_model = time.thread_time() - began
        return output

    backend.step = timed
    whole, outside = [], []
    while engine.has_work:
        decoding = len(engine.scheduler.running) == streams and all(
            sequence.remaining == 1 for sequence in engine.scheduler.running
        )
        began, processor = time.perf_counter(), time.thread_time()
        engine.step()
        engine.report()
        if decoding:
            outside.append((time.thread_time() - processor - in_model) * 1e3)
            whole.append((time.perf_counter() - began) * 1e3)
    del backend.step
    return {"engine_ms": round(statistics.median(outside), 2), "step_ms": round(statistics.median(whole), 1)}


def measure_prefix(llm: LLM, length: int) -> dict[str, float]:
    """Return the seconds to the first token of a new prompt, and of another prompt with the same start.

    The entries are tokens (`length`, the tokens of the shared start), first_token_s and shared_first_token_s.
    """
    shared = prompt(length, 1000, llm.model.manifest.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=1)
    seconds = [llm.generate([[*shared, last]], params)[0].timing.time_to_first_token or 0.0 for last in (5, 6)]
    return {"tokens": length, "first_token_s": round(seconds[0], 3), "shared_first_token_s": round(seconds[1], 3)}


@click.command(cls=SharpCommand)
@click.argument("folder")
@click.option("--streams", default=16, show_default=True, help="Requests that decode together.")
@click.option("--steps", default=24, show_default=True, help="Steps per case.")
@click.option("--prefix", default=2048, show_default=True, help="Tokens of the shared start.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(folder: str, streams: int, steps: int, prefix: int, output: Path | None) -> None:
    """Measure the engine's share of a decode step in each case, and what the prefix cache saves."""
    llm = LLM(folder, engine=EngineConfig(attention_interval=0, max_sequences=max(64, streams), speculative_tokens=0))
    measure_steps(llm, streams, 4, {"temperature": 0})  # the first steps take memory from the system
    alone = measure_steps(llm, 1, steps, {"temperature": 0})["step_ms"]
    rows: list[dict[str, Any]] = []
    for name, params in CASES.items():
        rows.append({"case": name, **measure_steps(llm, streams, steps, params)})
        click.echo(rows[-1])
    prefix_row = measure_prefix(llm, min(prefix, llm.model.context_limit - 2))
    click.echo(prefix_row)
    result: dict[str, Any] = {
        **header("engine_step"),
        "model": Path(folder).name,
        "streams": streams,
        "one_stream_ms": alone,
        "times_one_stream": round(streams * alone / rows[0]["step_ms"], 2),
        "rows": rows,
        "prefix": prefix_row,
    }
    write(output, result)


if __name__ == "__main__":
    main()
