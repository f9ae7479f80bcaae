"""Sampling of tokens on the device, as `sharp.plugins.cpu.sampling.sample` defines it, one program per row of logits.

Every pass reads the row again and computes its weights e^(sharpness (logit - highest)) anew, because a row of 128k fits
the device's L2 cache. Weights are at most 1, and positive float32 numbers have the order of their bits, so top-k and
top-p bisect over bits. The bisection makes passes over the row until at most `CANDIDATES` weights are left between the
bounds, and goes on over these weights in registers. Rows without top-k and top-p need no such passes.

A tile's weights are summed in float32, in the fixed tree of `tl.sum`, and tiles in float64, so a row's token depends on
that row alone and is the same in every run. Converting every weight to float64 would take longer than all other work;
the error of the tree is about 10^-7 of the tile. The tile with the sampled token is summed in float64.

Changes of logits (bias, penalties, masks) come first, in the memory of the logits and with the arithmetic of
`sharp.plugins.cpu.sampling.Changes`, bit for bit.
"""

from typing import TYPE_CHECKING

import numpy as np
import triton
import triton.language as tl

from sharp.core.errors import InputError
from sharp.plugins.cpu.sampling import CHANGE, Changes
from sharp.plugins.triton.arithmetic import exp2

if TYPE_CHECKING:
    from torch import Tensor

PARAMETERS = 5  # numbers per row: sharpness, top_k, top_p, min_p, random
NO_TOKEN = tl.constexpr(-1)
LOWEST_EXPONENT = tl.constexpr(-87.0)  # smaller exponents give weight 0, because their weight would be subnormal
LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number
ABOVE_ONE = tl.constexpr(0x3F800001)  # bits of the number after 1
BEHIND = tl.constexpr(0x7FFFFFFF)  # behind every token
AT_ONCE = tl.constexpr(512)  # changes of a row that are made together, one per thread
WORDS = tl.constexpr(4)  # 32-bit words of a change
ONE = tl.constexpr(0x3F800000)  # bits of 1.0


@triton.jit
def change(row, changes, start, end, vocab):
    """Apply the changes [start, end) to the row's logits, with barriers that order reads and writes of all threads.

    `row` points to float32 [vocab], `changes` to int32 [changes, 4]: token, and the bits of bias, repetition, amount.
    Tokens outside [0, vocab) are ignored; no token may occur twice.
    """
    lanes = tl.arange(0, AT_ONCE)
    for first in tl.range(start, end, AT_ONCE):
        there = first + lanes < end
        own = changes + (first + lanes) * WORDS
        tokens = tl.load(own, mask=there, other=-1)
        there = there & (tokens >= 0) & (tokens < vocab)
        bias = tl.load(own + 1, mask=there, other=0).to(tl.float32, bitcast=True)
        repetition = tl.load(own + 2, mask=there, other=ONE).to(tl.float32, bitcast=True)
        amount = tl.load(own + 3, mask=there, other=0).to(tl.float32, bitcast=True)
        old = tl.load(row + tokens, mask=there, other=0.0)
        tl.debug_barrier()  # one thread may store a logit that another has loaded
        old = tl.where(bias == -float("inf"), bias, old + bias)
        # The `where` between product and subtraction keeps the compiler from fusing them into one instruction.
        new = tl.where(old > 0, tl.div_rn(old, repetition), old * repetition)
        tl.store(row + tokens, new - amount, mask=there)
    tl.debug_barrier()


@triton.jit
def peak_of(row, vocab, TILE: tl.constexpr):
    """Return the highest logit, the first token that has it, and whether it is finite and no logit is NaN."""
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], -float("inf"), tl.float32)
    places = tl.full([TILE], 0, tl.int32)
    unknown = tl.full([TILE], 0, tl.int32)
    for start in tl.range(0, vocab, TILE):
        logits = tl.load(row + start + lanes, mask=start + lanes < vocab, other=-float("inf"))
        places = tl.where(logits > best, start, places)
        best = tl.where(logits > best, logits, best)
        unknown |= (logits != logits).to(tl.int32)
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, places + lanes, BEHIND), 0)
    usable = (highest > -float("inf")) & (highest < float("inf")) & (tl.max(unknown, 0) == 0)
    return highest, token, usable


@triton.jit
def weights_of(row, start, vocab, highest, sharpness, TILE: tl.constexpr):
    """Return the weights e^(sharpness (logit - highest)) of a tile of TILE tokens from `start` on, at most 1.

    The weight is 0 behind the row's end, and where the exponent is below -87. `row` points to float32 [vocab].
    """
    tokens = start + tl.arange(0, TILE)
    logits = tl.load(row + tokens, mask=tokens < vocab, other=-float("inf"))
    exponents = (logits - highest) * sharpness
    return tl.where(exponents >= LOWEST_EXPONENT, tl.minimum(exp2(exponents * LOG2_E), 1.0), 0.0)


@triton.jit
def tail_of(row, vocab, highest, sharpness, bound, TILE: tl.constexpr):
    """Return number, sum in float64, and minimum of a row's weights that are at least `bound` > 0.

    The weights are those of `weights_of`. Without such weights the minimum is infinity.
    """
    counts = tl.full([TILE], 0, tl.int32)
    lowest = tl.full([TILE], float("inf"), tl.float32)
    mass = tl.full([], 0, tl.float64)
    for start in tl.range(0, vocab, TILE):
        weights = weights_of(row, start, vocab, highest, sharpness, TILE)
        kept = weights >= bound
        counts += kept.to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(kept, weights, float("inf")))
        mass += tl.sum(tl.where(kept, weights, 0.0), 0).to(tl.float64)
    return tl.sum(counts, 0), mass, tl.min(lowest, 0)


@triton.jit
def gather(row, candidates, vocab, highest, sharpness, low, high, TILE: tl.constexpr):
    """Write a row's weights from `low` to below `high` to the front of the scratch memory `candidates`, lane by lane.

    There must be room for all of them.

    Lanes are counted first, because a sum over the lanes of every tile would take twice as long.
    """
    tl.debug_barrier()  # wait until all threads have read the weights of an earlier search
    counts = tl.full([TILE], 0, tl.int32)
    for start in tl.range(0, vocab, TILE):
        weights = weights_of(row, start, vocab, highest, sharpness, TILE)
        counts += ((weights >= low) & (weights < high)).to(tl.int32)
    places = tl.cumsum(counts, 0) - counts
    for start in tl.range(0, vocab, TILE):
        weights = weights_of(row, start, vocab, highest, sharpness, TILE)
        between = (weights >= low) & (weights < high)
        tl.store(candidates + places, weights, mask=between)
        places += between.to(tl.int32)
    tl.debug_barrier()


@triton.jit
def largest_bound(
    row,
    candidates,
    vocab,
    highest,
    sharpness,
    low,
    held,
    goal,
    counting,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Return the largest bound from `low` on whose tail reaches the goal: a count if `counting`, otherwise a sum.

    A tail is the weights that are at least the bound. `held` is the number of weights that are at least `low`;
    `candidates` points to scratch memory, float32 [CANDIDATES].
    """
    holds, fails = low.to(tl.int32, bitcast=True), tl.full([], ABOVE_ONE, tl.int32)
    left = tl.full([], 0, tl.int32)  # weights that are at least `fails`, and what they add to the goal
    left_amount = tl.full([], 0, tl.float64)
    while (fails - holds > 1) & (held - left > CANDIDATES):
        middle = holds + (fails - holds) // 2
        count, mass, lowest = tail_of(row, vocab, highest, sharpness, middle.to(tl.float32, bitcast=True), TILE)
        amount = tl.where(counting, count.to(tl.float64), mass)
        enough = amount >= goal
        held, left = tl.where(enough, count, held), tl.where(enough, left, count)
        left_amount = tl.where(enough, left_amount, amount)
        holds = tl.where(enough, lowest.to(tl.int32, bitcast=True), holds)  # never below `middle`
        fails = tl.where(enough, fails, middle)
    if fails - holds > 1:
        low_end, high_end = holds.to(tl.float32, bitcast=True), fails.to(tl.float32, bitcast=True)
        gather(row, candidates, vocab, highest, sharpness, low_end, high_end, TILE)
        lanes = tl.arange(0, CANDIDATES)
        weights = tl.load(candidates + lanes, mask=lanes < held - left, other=0.0)
        shares = tl.where(counting, 1.0, weights)
        while fails - holds > 1:
            middle = holds + (fails - holds) // 2
            kept = weights >= middle.to(tl.float32, bitcast=True)
            amount = left_amount + tl.sum(tl.where(kept, shares, 0.0), 0).to(tl.float64)
            lowest = tl.min(tl.where(kept, weights, float("inf")), 0)
            enough = amount >= goal
            holds = tl.where(enough, lowest.to(tl.int32, bitcast=True), holds)
            fails = tl.where(enough, fails, middle)
    return holds.to(tl.float32, bitcast=True)


@triton.jit
def draw(row, vocab, highest, sharpness, bound, target, TILE: tl.constexpr):
    """Return the first token whose cumulated weight, of weights of at least `bound`, is above `target`.

    If rounding leaves no such token, return the last token with a weight in its tile.
    """
    before, before_chosen = tl.full([], 0, tl.float64), tl.full([], 0, tl.float64)
    start, chosen = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    while start < vocab:
        weights = weights_of(row, start, vocab, highest, sharpness, TILE)
        mass = tl.sum(tl.where(weights >= bound, weights, 0.0), 0).to(tl.float64)
        chosen = tl.where(mass > 0, start, chosen)
        before_chosen = tl.where(mass > 0, before, before_chosen)
        before += mass
        start = tl.where(before > target, vocab, start + TILE)
    weights = weights_of(row, chosen, vocab, highest, sharpness, TILE)
    kept = weights >= bound
    cumulated = before_chosen + tl.cumsum(tl.where(kept, weights, 0.0).to(tl.float64), 0)
    tokens = chosen + tl.arange(0, TILE)
    first = tl.min(tl.where(kept & (cumulated > target), tokens, BEHIND), 0)
    last = tl.max(tl.where(kept, tokens, 0), 0)  # if rounding moved the target to the end of the tile
    return tl.minimum(first, last)


@triton.jit(do_not_specialize=("vocab",))
def sample_rows(
    logits,
    indices,
    samplings,
    starts,
    changes,
    candidates,
    sampled,
    vocab,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Sample one token per row. Grid: rows to sample.

    Shapes: logits float32 [any, vocab], changed in place, indices int64 [rows] into the logits, samplings float64
    [rows, 5] (sharpness, top_k, top_p, min_p, random), starts int32 [2 rows + 1] and changes int32 [changes, 4] as in
    `Changes`, candidates float32 [rows, CANDIDATES] scratch memory, sampled int64 [rows], the result: -1 for a row
    whose highest logit is not finite or that has a NaN.
    """
    program = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(indices + program) * vocab
    start, middle = tl.load(starts + 2 * program), tl.load(starts + 2 * program + 1)
    end = tl.load(starts + 2 * program + 2)
    if start < middle:
        change(row, changes, start, middle, vocab)
    if middle < end:
        change(row, changes, middle, end, vocab)
    parameters = samplings + program * 5
    sharpness = tl.load(parameters).to(tl.float32)
    top_k, top_p = tl.load(parameters + 1), tl.load(parameters + 2)
    highest, token, usable = peak_of(row, vocab, TILE)
    if usable & (sharpness != 0):
        own = candidates + program * CANDIDATES
        bound = tl.full([], SMALLEST, tl.float32)
        if (top_k > 0) | (top_p < 1):
            count, mass, _ = tail_of(row, vocab, highest, sharpness, bound, TILE)
            if (top_k > 0) & (top_k < count):
                bound = largest_bound(row, own, vocab, highest, sharpness, bound, count, top_k, True, TILE, CANDIDATES)
                count, mass, _ = tail_of(row, vocab, highest, sharpness, bound, TILE)
            if top_p < 1:
                goal = top_p * mass
                bound = largest_bound(row, own, vocab, highest, sharpness, bound, count, goal, False, TILE, CANDIDATES)
        bound = tl.maximum(bound, tl.load(parameters + 3).to(tl.float32))
        _, total, _ = tail_of(row, vocab, highest, sharpness, bound, TILE)
        token = draw(row, vocab, highest, sharpness, bound, tl.load(parameters + 4) * total, TILE)
    tl.store(sampled + program, tl.where(usable, token, NO_TOKEN).to(tl.int64))


ARGUMENTS = {
    "logits": "*fp32",
    "indices": "*i64",
    "samplings": "*fp64",
    "starts": "*i32",
    "changes": "*i32",
    "candidates": "*fp32",
    "sampled": "*i64",
    "vocab": "i32",
}
CONSTANTS = {"TILE": 8192, "CANDIDATES": 4096}  # logits per tile, and candidates per row in scratch memory
WARPS = 16


def sample(
    logits: "Tensor", samplings: "Tensor", indices: "Tensor | None" = None, changes: Changes | None = None
) -> "Tensor":
    """Sample a token for each row of samplings: logits float32 [n, vocab], samplings [rows, 5] -> int64 [rows].

    `indices` int64 [rows] are the rows of the logits, by default all of them in order. A row of samplings is sharpness,
    top_k, top_p, min_p and a random number in [0, 1), as for `sharp.plugins.cpu.sampling.sample`. Changes are made in
    place, so a row of the logits with changes may occur in `indices` only once. A row whose highest logit is not finite
    gets NO_TOKEN (-1). Nothing waits for the device.

    Raises:
        InputError: a tensor has another type or shape, is not contiguous, or is on the CPU without the interpreter.
    """
    import torch

    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous():
        raise InputError(f"logits are {logits.dtype} {list(logits.shape)}; they must be contiguous float32 [n, vocab]")
    if logits.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise InputError(
            "logits are on the CPU; the Triton kernels need a CUDA device, or TRITON_INTERPRET=1 to try them"
        )
    if indices is None:
        indices = torch.arange(len(logits), device=logits.device)
    rows = len(indices)
    if samplings.shape != (rows, PARAMETERS):
        raise InputError(f"samplings have shape {list(samplings.shape)}; it must be {[rows, PARAMETERS]}")
    if changes is None:
        changes = Changes.of([np.empty(0, CHANGE)] * (2 * rows))
    if len(changes.starts) != 2 * rows + 1:
        raise InputError(f"changes have {len(changes.starts)} starts; {rows} rows have {2 * rows + 1}")
    starts = torch.tensor(changes.starts, device=logits.device)
    words = torch.tensor(changes.entries.view(np.int32), device=logits.device)
    candidates = torch.empty((rows, CONSTANTS["CANDIDATES"]), device=logits.device)
    sampled = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        launch(logits, indices.contiguous(), samplings.double().contiguous(), starts, words, candidates, sampled)
    return sampled


def launch(
    logits: "Tensor",
    indices: "Tensor",
    samplings: "Tensor",
    starts: "Tensor",
    changes: "Tensor",
    candidates: "Tensor",
    sampled: "Tensor",
) -> None:
    """Start the kernel on the current stream; tensors are unchecked, of the shapes and types of `sample_rows`."""
    tensors = logits, indices, samplings, starts, changes, candidates, sampled
    sample_rows[(len(sampled),)](*tensors, logits.shape[1], **CONSTANTS, num_warps=WARPS)
