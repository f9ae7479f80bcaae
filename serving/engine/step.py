"""`run_step`: the model and the sampler on the chunks of one step, before any sequence changes."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sharp.serving.api.errors import EngineError
from sharp.serving.api.events import TokenLogprobs
from sharp.serving.backends import Backend, Batch, StepOutput
from sharp.serving.engine.batch import pack, select_outputs
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.logits_processors import SamplingRow
from sharp.serving.engine.logprobs import prompt_logprobs, sampled_logprobs
from sharp.serving.engine.sampler import sample
from sharp.serving.engine.scheduler import Chunk
from sharp.serving.engine.speculation import accepted_tokens


@dataclass(frozen=True)
class StepResult:
    """The output of the model, and the tokens sampled from it."""

    output: StepOutput
    positions: NDArray[np.int64]  # [tokens]
    tokens: dict[int, list[int]]  # chunk -> new tokens
    logprobs: dict[int, list[TokenLogprobs]]  # chunk -> those of the new tokens
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # chunk -> those of its tokens


def run_step(chunks: Rows[Chunk], blocks: BlockManager, backend: Backend, *, collect_stats: bool) -> StepResult:
    """Run the model on `chunks` and sample tokens; attention statistics are also collected if a request needs them."""
    outputs = select_outputs(chunks)
    requested = any(chunk.sequence.request.attention for chunk in chunks)
    batch = pack(chunks, blocks, outputs, collect_stats=collect_stats or requested)
    output = backend.step(batch)
    _check(output, batch)
    rows = [
        SamplingRow(chunks[chunk].sequence, chunks[chunk].draft[:ahead])
        for chunk, count in outputs.sampling
        for ahead in range(count)
    ]
    sampled = iter(sample(output.logits[: len(rows)], rows).tolist())
    tokens = {chunk: accepted_tokens(chunks[chunk], [*islice(sampled, count)]) for chunk, count in outputs.sampling}
    return StepResult(
        output,
        batch.positions,
        tokens,
        sampled_logprobs(chunks, outputs, output.logits, tokens),
        prompt_logprobs(chunks, outputs, output.logits),
    )


def _check(output: StepOutput, batch: Batch) -> None:
    """Refuse an output of another size, before a sequence changes by it."""
    tokens, rows = len(batch.positions), len(batch.logits_indices)
    if len(output.logits) != rows or (output.stats is not None and output.stats.shape[1] != tokens):
        raise EngineError(
            f"the model returned {len(output.logits)} rows of logits for {rows} outputs"
            + ("" if output.stats is None else f", statistics of {output.stats.shape[1]} tokens for {tokens}")
        )
