"""The cost of attention metrics: throughput while decoding, and the delay of tokens while /metrics is read.

python -m bench.metrics FOLDER [--streams 16] [--context 4096] [--output bench/results/metrics.json]

All streams share a prompt, which the prefix cache computes once, and decode together. Every second step collects
statistics for a metrics thread as the server has it, so steps with and without are neighbours in time, and what else
the machine does slows both. "cost_of_every_8th_step" is what the default takes of the throughput. Then a thread reads
/metrics beside every fifth step; "delay_ms" is how much longer these steps are than the others (medians).
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.result_file import PACKAGES, header, write
from sharp import LLM, SamplingParams
from sharp.core.cli import SharpCommand
from sharp.core.machine import available_cpus
from sharp.serving.api.request import GenerateRequest
from sharp.serving.config import BackendConfig, EngineConfig, MetricsConfig
from sharp.serving.observability.metrics import Metrics, ModelMetrics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
READ_EVERY_STEPS = 5
DEFAULT_INTERVAL = EngineConfig.attention_interval


@dataclass(frozen=True)
class TimedStep:
    """A step in which all streams decoded: its seconds, and what was done beside it.

    `collects` says that attention statistics were collected, `read` that /metrics was read during the step.
    """

    collects: bool
    read: bool
    seconds: float


def decode(
    llm: LLM, observed: ModelMetrics, streams: int, context: int, steps: int, read: Callable[[], None] | None = None
) -> list[TimedStep]:
    """Return the steps in which all streams decode; beside every fifth of them `read` runs in another thread.

    All streams have the same prompt of `context` tokens and generate `steps` + 8 tokens. `observed` gets the reports of
    all steps.
    """
    engine = llm._engine
    vocab = llm.model.manifest.vocab_size
    prompt = [3 + (7 * i * i + 3 * i) % (vocab - 3) for i in range(context)]
    for number in range(streams):
        params = SamplingParams(seed=number, max_tokens=steps + 8, ignore_eos=True)
        engine.add(llm.model.prepare(GenerateRequest(prompt, params)))
    found: list[TimedStep] = []
    with ThreadPoolExecutor(1) as pool:
        while engine.has_work:
            running = engine.scheduler.running
            decoding = len(running) == streams and all(sequence.remaining == 1 for sequence in running)
            collects = engine._steps % 2 == 0
            # Steps are chosen by count, because more readings at fixed times would fall into longer steps.
            reading = None if read is None or len(found) % READ_EVERY_STEPS else pool.submit(read)
            began = time.perf_counter()
            engine.step()
            observed.observe(engine.report())
            seconds = time.perf_counter() - began
            if reading is not None:
                reading.result()
            if decoding:
                found.append(TimedStep(collects, reading is not None, seconds))
    return found


@click.command(cls=SharpCommand)
@click.argument("folder")
@click.option("--streams", default=16, show_default=True, help="Requests that decode together.")
@click.option("--context", default=4096, show_default=True, help="Tokens of their prompt.")
@click.option("--steps", default=200, show_default=True, help="Steps of each part.")
@click.option("--threads", type=int, default=available_cpus, show_default="one per processor", help="Threads.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(folder: str, streams: int, context: int, steps: int, threads: int, output: Path | None) -> None:
    """Measure what attention statistics and reading /metrics cost a decode step of the model FOLDER."""
    tokens = 2 * context + streams * (steps + 64)
    llm = LLM(
        folder,
        backend=BackendConfig(threads=threads),
        engine=EngineConfig(tokens, max_sequences=max(64, streams), attention_interval=2, speculative_tokens=0),
    )
    manifest = llm.model.manifest
    metrics = Metrics()
    observed = metrics.add_model(manifest, MetricsConfig())
    decode(llm, observed, streams, context, 8)  # the first steps take memory from the system

    found = decode(llm, observed, streams, context, steps)
    with_it, without = (
        statistics.median(step.seconds for step in found if step.collects == flag) for flag in (True, False)
    )
    row: dict[str, Any] = {
        "step_ms": round(without * 1e3, 3),
        "collecting_step_ms": round(with_it * 1e3, 3),
        "cost_of_every_8th_step": round((with_it / without - 1) / DEFAULT_INTERVAL, 5),
    }

    readings: list[float] = []

    def read() -> None:
        began = time.perf_counter()
        metrics.text(OPENMETRICS)
        readings.append(time.perf_counter() - began)

    found = decode(llm, observed, streams, context, steps, read)
    reading, alone = ([step.seconds for step in found if step.read == flag] for flag in (True, False))
    row |= {
        "readings": len(readings),
        "reading_ms": round(statistics.median(readings) * 1e3, 2),
        "slowest_reading_ms": round(max(readings) * 1e3, 2),
        "delay_ms": round((statistics.median(reading) - statistics.median(alone)) * 1e3, 2),
        "lines": metrics.text(OPENMETRICS)[0].count(b"\n"),
    }
    observed.close()
    click.echo(row)
    result = {
        **header("metrics", (*PACKAGES, "prometheus-client")),
        "model": Path(folder).name,
        "heads": f"{manifest.layers} x {manifest.q_heads}",
        "streams": streams,
        "context": context,
        "threads": threads,
        "row": row,
    }
    write(output, result)


if __name__ == "__main__":
    main()
