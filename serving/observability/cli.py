"""The command `sharp baseline`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sharp.core.cli import SharpCommand, if_interrupted, status
from sharp.core.machine import available_cpus
from sharp.core.output_file import check_can_write
from sharp.serving.api.errors import InputError
from sharp.serving.config import BackendConfig, EngineConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHARACTERS_PER_TOKEN = 8  # text beyond this many characters per token is not read


@click.command(cls=SharpCommand, epilog="See also: sharp docs metrics, sharp docs tutorials/dispersed-heads.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("text", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File for the baseline."
)
@click.option(
    "--tokens", default=16384, show_default=True, type=click.IntRange(min=1), help="Maximum number of tokens to read."
)
@click.option("--context", default=1024, show_default=True, help="Tokens of each sequence that the text is read in.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads.  [default: one per processor that it may use]")
def baseline(folder: Path, text: Path, output: Path, tokens: int, context: int, threads: int | None) -> None:
    """Record how the attention entropy of every head of the model FOLDER is distributed on TEXT.

    `sharp-serve --attention-baseline FILE` compares the entropies of its requests with the file, in the metric
    sharp_attention_drift_psi. Choose a TEXT like the requests of the server, and --context as long as theirs, because
    longer contexts are not compared.
    """
    # numpy and the engine take half a second to import, which --help need not wait for.
    import numpy as np

    from sharp.serving.api.events import Failed
    from sharp.serving.api.request import GenerateRequest
    from sharp.serving.api.sampling_params import SamplingParams
    from sharp.serving.engine.loading import load_model_folder
    from sharp.serving.observability.metrics.baseline import LEAST_RANGE_TOKENS, make_baseline, ranged
    from sharp.serving.observability.metrics.dispersion import LEAST_CONTEXT
    from sharp.serving.text.tokenizer import tokenize

    if context <= LEAST_CONTEXT:
        raise InputError(f"--context is {context}, but must be above {LEAST_CONTEXT}")
    check_can_write(output)
    if_interrupted("nothing was written")
    backend = BackendConfig(threads=threads or available_cpus())
    # Sequences run one at a time, each in one step and without a prefix cache, so that every token is computed and
    # collected.
    config = EngineConfig(
        cache_tokens=max(context, 64),
        max_batch_tokens=max(context, 64),
        max_sequences=1,
        prefill_chunk_tokens=context,
        prefix_cache=False,
        attention_interval=1,
    )
    with status(f"Loading {folder}"):
        model, _, engine = load_model_folder(folder, backend, config)
    if model.tokenizer is None:
        raise InputError(f"{folder} has no tokenizer, so no text can be read; export it from a checkpoint with one")
    length = min(context, model.context_limit)
    try:
        start = text.read_text(encoding="utf-8")[: tokens * CHARACTERS_PER_TOKEN]
    except UnicodeDecodeError as error:
        raise InputError(f"{text} is not text in UTF-8; save it as UTF-8, or give another") from error
    ids = tokenize(start, model.manifest, model.tokenizer)[:tokens]

    def sequences() -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Yield the entropies [layers, tokens, q_heads] of each step, and the range of context of its tokens."""
        for first in range(0, len(ids), length):
            params = SamplingParams(max_tokens=0)
            engine.add(model.prepare(GenerateRequest(ids[first : first + length], params)))
            while engine.has_work:
                for event in engine.step():
                    if isinstance(event, Failed):
                        raise event.error
                for rows in engine.report().attention:
                    yield ranged(rows)

    with status(f"Reading {len(ids)} tokens of {text}"):
        parts = list(sequences())
    empty = np.zeros((model.manifest.layers, 0, model.manifest.q_heads))
    values = np.concatenate([empty, *(part for part, _ in parts)], axis=1)
    ranges = np.concatenate([np.zeros(0, np.int64), *(part for _, part in parts)])
    if not np.isfinite(values).all():
        raise InputError(
            f"the entropies of {folder} on {text} are not finite; export the model again or choose another text"
        )
    made = make_baseline(model.manifest, text.name, values, ranges)
    if made is None:
        raise InputError(
            f"{text} has {values.shape[1]} tokens that see over {LEAST_CONTEXT} keys; a baseline needs "
            f"{LEAST_RANGE_TOKENS} of similar context"
        )
    made.write(output)
    click.echo(f"{output}: entropy of {values.shape[0]} x {values.shape[2]} heads on {made.tokens} tokens of {text}")
    click.echo(f"Contexts of up to {made.contexts[-1]} tokens; longer ones are not compared")
    click.echo(f"Compare with it: sharp-serve {folder} --attention-baseline {output}")
