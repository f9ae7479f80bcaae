"""The cost and gain of a precision: perplexity of a text, time of a decode step and size of model folders.

python -m bench.precision --text FILE FOLDER [FOLDER ...] [--tokens 4096] [--output bench/results/precision.json]

The other folders are compared with the first. The text is read in windows of 2,048 tokens through the server's own
backend. A decode step is one token after a context of 128; "least" is the fastest step, which other work on the machine
disturbs least. `--steps 0` times no step, for machines with other work.
"""

import json
import time
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.result_file import header, write
from sharp.core.cli import SharpCommand
from sharp.core.manifest import Manifest, read_manifest
from sharp.serving.backends import DecoderBackend, StepInputs, load_backend
from sharp.serving.config import BackendConfig

WINDOW, CHUNK, CONTEXT = 2048, 256, 128


def read(
    backend: DecoderBackend, tokens: NDArray[np.int64], start: int, block_size: int, *, every: bool
) -> NDArray[np.float32]:
    """Return logits after each of `tokens` (`every`), or after the last, float32 [1 or tokens, vocab].

    The `start` tokens before them are in the cache already, in blocks 0, 1, ...; `tokens` are stored behind them.
    """
    positions = np.arange(start, start + len(tokens))
    batch = StepInputs(
        input_ids=tokens,
        positions=positions,
        slot_mapping=positions.astype(np.int32),
        block_table=np.arange(WINDOW // block_size, dtype=np.int32)[None],
        query_start=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([start], np.int32),
        logits_indices=np.arange(len(tokens)) if every else np.array([len(tokens) - 1]),
        collect_stats=False,
    )
    return backend.step(batch).logits


def perplexity(backend: DecoderBackend, tokens: NDArray[np.int64], block_size: int) -> float:
    """Return the perplexity of tokens, at least two: the exponential of their mean cross entropy in nats.

    The tokens are read in windows of 2,048, whose first tokens are not predicted. Blocks 0, 1, ... of the backend's
    cache are overwritten.
    """
    losses = []
    for window in np.split(tokens, range(WINDOW, len(tokens), WINDOW)):
        for start in range(0, len(window) - 1, CHUNK):
            part = window[start : start + CHUNK]
            logits = read(backend, part, start, block_size, every=True).astype(np.float64)
            targets = window[start + 1 : start + 1 + len(part)]
            logits = logits[: len(targets)]
            top = logits.max(-1, keepdims=True)
            total = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
            losses.append(total - logits[np.arange(len(targets)), targets])
    return float(np.exp(np.concatenate(losses).mean()))


def measure(folder: Path, text: str, tokens: int, steps: int) -> dict[str, float | str]:
    """Return the row of one folder, on one thread: perplexity, the time of a decode step and the size.

    The first `tokens` tokens of `text` are read. decode_ms (median) and decode_ms_least, in milliseconds, are of
    `steps` steps and missing if that is 0; mb is the size of the model's files.
    """
    manifest: Manifest = read_manifest(folder)
    backend = load_backend(folder, manifest, BackendConfig(threads=1))
    size = manifest.cache.block_size
    backend.allocate_cache(WINDOW // size)
    ids = np.array(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:tokens])
    found = perplexity(backend, ids, size)
    times = []
    for step in range(steps):
        began = time.perf_counter()
        read(backend, ids[step : step + 1], CONTEXT + step, size, every=False)
        times.append(1e3 * (time.perf_counter() - began))
    timed = {"decode_ms": float(np.median(times)), "decode_ms_least": min(times)} if times else {}
    return {
        "folder": folder.name,
        "weights": manifest.quantization or manifest.dtype,
        "cache": manifest.cache.dtype,
        "tokens": len(ids),
        "perplexity": round(found, 4),
        **{name: round(taken, 1) for name, taken in timed.items()},
        "mb": round(sum(file.stat().st_size for file in folder.glob("model.onnx*")) / 1e6),
    }


@click.command(cls=SharpCommand)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--text", required=True, type=click.Path(path_type=Path, exists=True), help="A text of enough tokens.")
@click.option("--tokens", default=4096, show_default=True, help="How many of its tokens to read.")
@click.option("--steps", default=40, show_default=True, help="How many steps of decoding to time.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(folders: tuple[Path, ...], text: Path, tokens: int, steps: int, output: Path | None) -> None:
    """Measure every folder on one thread, print a line each and write the results."""
    content, rows = text.read_text(encoding="utf-8"), []
    for folder in folders:
        row = measure(folder, content, tokens, steps)
        row["perplexity_change"] = round(float(row["perplexity"]) / float((rows or [row])[0]["perplexity"]) - 1, 4)
        rows.append(row)
        click.echo(json.dumps(row))
    write(output, {**header("precision"), "text": text.name, "rows": rows})


if __name__ == "__main__":
    main()
