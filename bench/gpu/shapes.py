"""Decode times of other batches: sequences of uneven lengths, two to four tokens each, and heads of 64."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from bench.gpu.cases import Cases
from bench.gpu.compilation import Job, options_of
from bench.gpu.inputs import make_call, run
from bench.gpu.speed import SPREAD, time_call

PHASES: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")
NORMALIZERS = ("softmax", "ssa", "adaptive_softmax", "entmax")
CONTEXTS = (4096, 32_768, 131_072)


@dataclass(frozen=True)
class Heads:
    """The number of query heads and KV heads, and the channels of a head."""

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def options(self) -> dict[str, int]:
        """The sizes as arguments of `make_call`."""
        return dict(vars(self))


LARGE, SMALL = Heads(32, 8, 128), Heads(9, 3, 64)
BATCHES = {
    **{f"8 of {context}": ((context - 1, 1),) * 8 for context in CONTEXTS},
    "1 of 131072 beside 63 of 1024": ((131_071, 1), *(((1023, 1),) * 63)),
    "64 of 3056": ((3055, 1),) * 64,  # as many keys as the batch before, but even: the ratio is the cost of unevenness
    "8 of 32768, 2 tokens": ((32_766, 2),) * 8,
    "8 of 32768, 4 tokens": ((32_764, 4),) * 8,
}


def jobs() -> list[Job]:
    """Return the kernels to compile before `shapes`: every normalizer and phase for two sizes of heads."""
    return [
        Job(options_of(make_call(name, ((1, 1),), device="cpu", **heads.options)), phase)
        for heads in (LARGE, SMALL)
        for name in NORMALIZERS
        # The host sees only the tokens of all sequences, so for several tokens each it launches the prefill kernel,
        # too.
        for phase in PHASES
    ]


def shapes(quick: bool, cases: Cases) -> Iterator[dict[str, Any]]:
    """Yield a row per size of heads, batch and normalizer: microseconds a layer, and bytes of the cache a second."""
    for heads in (LARGE, SMALL):
        for name, sequences in BATCHES.items():
            for normalizer in NORMALIZERS[:1] + NORMALIZERS[-1:] if quick else NORMALIZERS:
                named = {"subject": normalizer, "sequences": name, "head_dim": heads.head_dim}
                yield from cases.run(named, partial(_time, normalizer, sequences, heads))


def _time(normalizer: str, sequences: tuple[tuple[int, int], ...], heads: Heads) -> Iterator[dict[str, Any]]:
    """Yield one row: microseconds per layer of the op and its rate of reading the cache.

    `sequences` are (context, new tokens) of each sequence.
    """
    call = make_call(normalizer, sequences, spread=SPREAD, **heads.options)
    timing = time_call(lambda: run(call))
    keys = sum(context + new for context, new in sequences)
    yield {
        "microseconds_per_layer": timing.median * 1e3,
        "cache_gb_per_second": keys * heads.kv_heads * heads.head_dim * 2 * 2 / timing.median / 1e6,
        "spread": timing.spread,
    }
