"""What a step computes, before any sequence has changed."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sharp.serving.api.events import TokenLogprobs
from sharp.serving.backends import Backend, StepOutput
from sharp.serving.engine.batch import pack, wanted_outputs
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.logprobs import answer_logprobs, prompt_logprobs
from sharp.serving.engine.place import Place
from sharp.serving.engine.sampler import sample
from sharp.serving.engine.scheduler import Chunk
from sharp.serving.engine.speculation import agreed


@dataclass(frozen=True)
class Result:
    """The output of the model, and what was drawn from it."""

    output: StepOutput
    positions: NDArray[np.int64]  # [tokens]
    tokens: dict[int, list[int]]  # chunk -> new tokens
    logprobs: dict[int, list[TokenLogprobs]]  # chunk -> those of the new tokens
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # chunk -> those of its tokens


def compute(chunks: Rows[Chunk], blocks: BlockManager, backend: Backend, *, sampled: bool) -> Result:
    """Run the model on `chunks` and draw tokens; statistics are collected if `sampled` or asked for by a request."""
    outputs = wanted_outputs(chunks)
    wanted = any(chunk.sequence.request.attention for chunk in chunks)
    batch = pack(chunks, blocks, outputs, collect_stats=sampled or wanted)
    output = backend.step(batch)
    places = [
        Place(chunks[row].sequence, chunks[row].draft[:guessed])
        for row, rows in outputs.sampling
        for guessed in range(rows)
    ]
    drawn = iter(sample(output.logits[: len(places)], places).tolist())
    tokens = {row: agreed(chunks[row], [*islice(drawn, rows)]) for row, rows in outputs.sampling}
    return Result(
        output,
        batch.positions,
        tokens,
        answer_logprobs(chunks, outputs, output.logits, tokens),
        prompt_logprobs(chunks, outputs, output.logits),
    )
