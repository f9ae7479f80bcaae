"""The time that the host adds to a step of a device that only waits: planning, packing, sampling, sending events.

python -m bench.host_share FOLDER [--output bench/results/host_share.json]

FOLDER gives the vocabulary and the tokenizer; no model is computed. "step_ms" is the mean time from one step of the
device to the next while all streams decode, and "wait_ms" what such a wait takes in a thread that does nothing else,
measured beside it. "host_share" is (step_ms - wait_ms) / step_ms. "host_ms" is what is left of it where no other
process takes the cores: the processor time, between two steps, of the thread that starts them. Where the device does
not sample ("logits"), the host does. ONNX Runtime's backend on a GPU samples there unless a row of the step needs
logits; what its kernel takes is not part of this.

Asynchronous and synchronous scheduling are interleaved; the figures are medians over `--rounds` rounds.
"""

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import click

from bench.emulated_device import EmulatedDevice, SamplingDevice
from bench.result_file import header, write
from sharp import SamplingParams
from sharp.core.cli import SharpCommand
from sharp.core.manifest import read_manifest
from sharp.serving.api.events import Event, Finished
from sharp.serving.api.request import GenerateRequest
from sharp.serving.config import EngineConfig, MetricsConfig
from sharp.serving.engine.engine import Engine
from sharp.serving.engine.thread import EngineThread
from sharp.serving.observability.metrics import Metrics
from sharp.serving.text.tokenizer import Tokenizer

PROMPT_TOKENS = 16
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top_p": {"top_p": 0.95, "temperature": 0.8},
}
DEVICES = {"tokens": SamplingDevice, "logits": EmulatedDevice}


def wait_seconds(seconds: float) -> float:
    """Return the mean of 100 times in seconds that a sleep of `seconds` takes, in a thread like the device's."""
    found: list[float] = []

    def wait() -> None:
        """Measure how long 100 sleeps really take."""
        for _ in range(100):
            began = time.perf_counter()
            time.sleep(seconds)
            found.append(time.perf_counter() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    return statistics.mean(found)


def step_seconds(
    folder: Path,
    device: type[EmulatedDevice],
    seconds: float,
    streams: int,
    steps: int,
    params: dict[str, Any],
    mode: str,
) -> tuple[float, float]:
    """Return means over steps in which all streams decode: time between steps, and processor time of their thread.

    Both are in seconds. `seconds` is the device's time of a step, `steps` the tokens of every stream, `params` are of
    `SamplingParams`, and `mode` is `async_scheduling` of `EngineConfig`, "on" or "off".
    """
    manifest = read_manifest(folder)
    backend = device(manifest, seconds, streams)
    blocks = streams * (2 + (PROMPT_TOKENS + steps + 16) // manifest.cache.block_size)
    config = EngineConfig(
        max_sequences=max(64, streams), max_waiting_requests=4096, speculative_tokens=0, async_scheduling=mode
    )
    engine = Engine(backend, manifest, Tokenizer(folder / "tokenizer.json"), blocks, config)
    metrics = Metrics().add_model(manifest, MetricsConfig())
    thread = EngineThread(engine, metrics.observe)
    left, done = [streams], threading.Event()

    def sink(event: Event) -> None:
        """Count the requests that are left, and set `done` after the last."""
        if isinstance(event, Finished):
            left[0] -= 1
            if not left[0]:
                done.set()

    for number in range(streams):
        prompt = tuple(3 + (7 * i * i + 3 * i + 101 * number) % (manifest.vocab_size - 3) for i in range(PROMPT_TOKENS))
        sampling = SamplingParams(seed=number, ignore_eos=True, max_tokens=steps, **params)
        request = GenerateRequest(prompt, sampling, request_id=str(number), prompt_ids=prompt, max_new_tokens=steps)
        thread.submit(request, sink)
    thread.start()
    done.wait()
    thread.stop()
    metrics.close()
    whole = [computed for computed in backend.computed if computed.sequences == streams][2:-2]
    first, last, between = whole[0], whole[-1], len(whole) - 1
    return (last.began - first.began) / between, (last.processor - first.processor) / between


@click.command(cls=SharpCommand)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--streams", multiple=True, type=int, default=(1, 16, 64), show_default=True, help="Requests.")
@click.option("--milliseconds", multiple=True, type=float, default=(2, 5, 10), show_default=True, help="Of a step.")
@click.option("--steps", default=200, show_default=True, help="Steps of each measurement.")
@click.option("--rounds", default=3, show_default=True, help="How often everything is measured.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(
    folder: Path,
    streams: tuple[int, ...],
    milliseconds: tuple[float, ...],
    steps: int,
    rounds: int,
    output: Path | None,
) -> None:
    """Measure the time that the host adds to a step of an emulated device, with both kinds of scheduling."""
    rows = []
    for gives, device in DEVICES.items():
        for case, params in CASES.items():
            for each in milliseconds:
                for count in streams:
                    waits: list[float] = []
                    found: dict[str, list[tuple[float, float]]] = {"async": [], "sync": []}
                    for _ in range(rounds):
                        waits.append(wait_seconds(each / 1e3))
                        for name, mode in (("async", "on"), ("sync", "off")):
                            found[name].append(step_seconds(folder, device, each / 1e3, count, steps, params, mode))
                    waited = statistics.median(waits)
                    row: dict[str, Any] = {"gives": gives, "case": case, "device_ms": each, "streams": count}
                    row["wait_ms"] = round(waited * 1e3, 3)
                    for name, measured in found.items():
                        step, processor = (statistics.median(values) for values in zip(*measured, strict=True))
                        row[f"{name}_step_ms"] = round(step * 1e3, 3)
                        row[f"{name}_host_share"] = round(1 - waited / step, 4)
                        row[f"{name}_host_ms"] = round(processor * 1e3, 3)
                    rows.append(row)
                    click.echo(row)
    write(output, {**header("host_share"), "model": folder.name, "steps": steps, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
