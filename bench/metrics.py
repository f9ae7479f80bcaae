"""What attention metrics cost: throughput while decoding, and what reading /metrics does to tokens.

python bench/metrics.py FOLDER [--streams 16] [--context 4096] [--output bench/results/metrics.json]

All streams share a prompt, which the prefix cache computes once, and decode together. Every second step collects
statistics for a metrics thread as the server has it, so steps with and without are neighbours in time, and what else
the machine does slows both. "cost_of_every_8th_step" is what the default takes of the throughput. Then a thread
reads /metrics four times a second; "delay_ms" is how much longer steps beside a reading are than the others (medians).
"""

import json
import os
import platform
import statistics
import threading
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from sharp import LLM, SamplingParams
from sharp.plugins.cli import SharpCommand
from sharp.serving.config import BackendConfig, EngineConfig, MetricsConfig, available_cpus
from sharp.serving.metrics import Metrics, ModelMetrics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
READ_EVERY_SECONDS = 0.25
DEFAULT_INTERVAL = EngineConfig.attention_interval


def decode(llm: LLM, observed: ModelMetrics, streams: int, context: int, steps: int) -> list[tuple[bool, float, float]]:
    """(collects statistics, began, seconds) of every step in which all streams decode."""
    engine = llm._engine
    vocab = llm.model.manifest.vocab_size
    prompt = [3 + (7 * i * i + 3 * i) % (vocab - 3) for i in range(context)]
    for number in range(streams):
        params = SamplingParams(seed=number, max_tokens=steps + 8, ignore_eos=True)
        engine.add(llm.model.prepare(str(number), prompt, params))
    found = []
    while engine.has_work:
        running = engine.scheduler.running
        decoding = len(running) == streams and all(one.remaining == 1 for one in running)
        collects = engine._steps % 2 == 0
        began = time.perf_counter()
        engine.step()
        observed.observe(engine.report())
        if decoding:
            found.append((collects, began, time.perf_counter() - began))
    return found


def read(metrics: Metrics, stop: threading.Event, readings: list[tuple[float, float]]) -> None:
    """Read the metrics again and again; note when each reading began and ended."""
    while not stop.wait(READ_EVERY_SECONDS):
        began = time.perf_counter()
        metrics.text(OPENMETRICS)
        readings.append((began, time.perf_counter()))


@click.command(cls=SharpCommand)
@click.argument("folder")
@click.option("--streams", default=16, show_default=True, help="Requests that decode together.")
@click.option("--context", default=4096, show_default=True, help="Tokens of their prompt.")
@click.option("--steps", default=200, show_default=True, help="Steps of each part.")
@click.option("--threads", type=int, default=available_cpus, show_default="one per processor", help="Threads.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(folder: str, streams: int, context: int, steps: int, threads: int, output: Path | None) -> None:
    """Measure and write the results."""
    tokens = 2 * context + streams * (steps + 64)
    llm = LLM(
        folder,
        backend=BackendConfig(threads=threads),
        engine=EngineConfig(tokens, max_sequences=max(64, streams), attention_interval=2),
    )
    manifest = llm.model.manifest
    metrics = Metrics()
    observed = metrics.add_model(manifest, MetricsConfig())
    decode(llm, observed, streams, context, 8)  # the first steps take memory from the system

    found = decode(llm, observed, streams, context, steps)
    with_it, without = (statistics.median(one[2] for one in found if one[0] == collects) for collects in (True, False))
    row: dict[str, Any] = {
        "step_ms": round(without * 1e3, 3),
        "collecting_step_ms": round(with_it * 1e3, 3),
        "cost_of_every_8th_step": round((with_it / without - 1) / DEFAULT_INTERVAL, 5),
    }

    stop, readings = threading.Event(), list[tuple[float, float]]()
    reader = threading.Thread(target=read, args=(metrics, stop, readings))
    reader.start()
    found = decode(llm, observed, streams, context, steps)
    stop.set()
    reader.join()
    beside = [
        seconds
        for _, began, seconds in found
        if any(began < read_ended and read_began < began + seconds for read_began, read_ended in readings)
    ]
    alone = [seconds for _, _, seconds in found if seconds not in beside]
    row |= {
        "readings": len(readings),
        "reading_ms": round(statistics.median(ended - began for began, ended in readings) * 1e3, 2),
        "slowest_reading_ms": round(max(ended - began for began, ended in readings) * 1e3, 2),
        "delay_ms": round((statistics.median(beside) - statistics.median(alone)) * 1e3, 2),
        "slowest_delay_ms": round((max(beside) - max(alone)) * 1e3, 2),
        "lines": metrics.text(OPENMETRICS)[0].count(b"\n"),
    }
    observed.close()
    click.echo(row)
    result = {
        "benchmark": "metrics",
        "model": Path(folder).name,
        "heads": f"{manifest.layers} x {manifest.q_heads}",
        "streams": streams,
        "context": context,
        "threads": threads,
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {name: version(name) for name in ("sharp-attention", "onnxruntime", "numpy", "prometheus-client")},
        "row": row,
    }
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
