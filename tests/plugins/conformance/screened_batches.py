"""Random and adversarial calls under entmax with a key screen, many per batch, held to float64 results.

`python -m tests.plugins.conformance.screened_batches` runs 10,000 calls; the tests run a few hundred. A call is one
token of one sequence with one key head. A batch is one call of the op with such a call in each sequence.
"""

import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.result_file import header, write
from sharp.plugins.op.key_screen import screen_of_cache
from tests.plugins.conformance.cases import Case
from tests.plugins.conformance.screened import TYPES, run

KEYS = 576  # more than the shortest context that is screened
VALUE_DIM = 4
Random = np.random.Generator
Arrays = tuple[np.ndarray, np.ndarray]  # the query [group, head_dim] and the keys [KEYS, head_dim]


def _random(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    query = rng.standard_normal(size) + 0.2 * rng.standard_normal((group, size))
    return query * rng.choice([0.3, 1, 3, 8]), rng.standard_normal((KEYS, size))


def _equal(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    return rng.standard_normal((group, size)), np.tile(rng.standard_normal(size), (KEYS, 1))


def _nearly_equal(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    query, keys = _equal(rng, group, size, alpha)
    return query, keys * (1 + rng.integers(-2, 3, keys.shape) * 2.0**-23)


def _one_key(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    """Return a query and keys of which one key alone has a weight."""
    query, keys = _random(rng, group, size, alpha)
    keys[rng.integers(KEYS)] = 40 * query[0] / np.linalg.norm(query[0]) * (1 + 10 / np.linalg.norm(query[0]))
    return query, keys


def _huge_key(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    query, keys = _random(rng, group, size, alpha)
    keys[rng.integers(KEYS)] *= 10.0 ** rng.integers(3, 13)
    return query, keys


def _number_in_a_key(*numbers: float) -> Callable[[Random, int, int, float], Arrays]:
    def make(rng: Random, group: int, size: int, alpha: float) -> Arrays:
        query, keys = _random(rng, group, size, alpha)
        keys[rng.integers(KEYS), rng.integers(size)] = rng.choice(numbers)
        return query, keys

    return make


def _denormal(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    query, keys = _random(rng, group, size, alpha)
    return (query * 1e-41, keys) if rng.random() < 0.5 else (query, keys * 1e-41)


def _all_survive(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    query, keys = _random(rng, group, size, alpha)
    return 0.003 * query, keys


def _at_the_limit(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    """Return keys with logits 1 / (alpha - 1) below the largest logit, within a few units in the last place."""
    query, keys = np.zeros((group, size)), np.zeros((KEYS, size))
    query[:, 0] = 1
    largest = float(rng.integers(-4, 5))
    keys[:, 0] = (largest - 1 / (alpha - 1)) * (1 + rng.integers(-3, 4, KEYS) * 2.0**-22)
    keys[rng.integers(KEYS), 0] = largest
    return query, keys


def _longest(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    """Return keys about as long as 2^60, the length from which keys are no longer screened."""
    query, keys = _random(rng, group, size, alpha)
    return query * 2.0**-60, keys * (2.0**60 / size**0.5) * rng.uniform(0.9, 1.1)


def _of_many_lengths(rng: Random, group: int, size: int, alpha: float) -> Arrays:
    query, keys = _random(rng, group, size, alpha)
    return query, keys * 10 ** rng.uniform(-30, 2, (KEYS, 1))


KINDS: dict[str, Callable[[Random, int, int, float], Arrays]] = {
    "random": _random,
    "equal logits": _equal,
    "nearly equal logits": _nearly_equal,
    "one key alone": _one_key,
    "one huge key": _huge_key,
    "NaN": _number_in_a_key(np.nan),
    "infinity": _number_in_a_key(np.inf, -np.inf),
    "denormals": _denormal,
    "all survive": _all_survive,
    "at the limit": _at_the_limit,
    "as long as can be": _longest,
    "many lengths": _of_many_lengths,
}


@dataclass(frozen=True)
class Batch:
    """Several calls [calls] of the op, the kind of each call, and the sizes and options that all calls share."""

    query: np.ndarray  # [calls, group, head_dim] float32
    keys: np.ndarray  # [calls, KEYS, head_dim] float32, rounded to the cache's dtype
    values: np.ndarray  # [calls, KEYS, VALUE_DIM]
    kinds: tuple[str, ...]
    dtype: str
    block_size: int
    shift: np.ndarray  # [head_dim]
    slopes: np.ndarray | None
    collect_stats: bool
    attributes: dict[str, Any]


def make_batch(seed: int, calls: int) -> Batch:
    """Return calls of every kind with a random shape. Head size, group, dtype and alpha differ between batches."""
    rng = np.random.default_rng(seed)
    group, size = int(rng.choice([1, 2, 3, 8])), int(rng.choice([5, 16, 21, 64]))
    alpha, dtype = float(rng.choice([1.2, 1.5, 2.0])), list(TYPES)[seed % 3]
    kinds = tuple(list(KINDS)[(seed + index) % len(KINDS)] for index in range(calls))
    with np.errstate(over="ignore"):
        query, keys = (
            np.stack(arrays).astype(np.float32)
            for arrays in zip(*(KINDS[kind](rng, group, size, alpha) for kind in kinds), strict=True)
        )
        values = rng.standard_normal((calls, KEYS, VALUE_DIM))
        keys, values = (array.astype(TYPES[dtype][0]).astype(np.float32) for array in (keys, values))
    shift = rng.normal(0, rng.choice([0, 0.3, 1e6]), size).astype(np.float32)
    slopes = rng.uniform(0, 0.5, group).astype(np.float32) if rng.random() < 0.25 else None
    attributes = {"alpha": alpha, "scale": 1.0, "softcap": float(rng.choice([0, 0, 8.0]))}
    block_size = int(rng.choice([16, 32, 64]))
    return Batch(query, keys, values, kinds, dtype, block_size, shift, slopes, bool(seed % 2), attributes)


def as_case(batch: Batch) -> Case:
    """Return the batch as one call of the op. The last key of each sequence is new in the call."""
    calls, size, each = len(batch.kinds), batch.keys.shape[2], KEYS // batch.block_size
    table = np.random.default_rng(0).permutation(calls * each).astype(np.int32).reshape(calls, each)
    caches = {}
    for name, array in (("key_cache", batch.keys), ("value_cache", batch.values)):
        blocks = array.reshape(calls * each, batch.block_size, -1)
        cache = np.empty_like(blocks)
        cache[table.ravel()] = blocks
        caches[name] = cache[:, None]
    caches["key_cache"] = np.ascontiguousarray(caches["key_cache"].swapaxes(2, 3))
    inputs = {
        "query": batch.query,
        "key": batch.keys[:, -1:],
        "value": batch.values[:, -1:],
        **caches,
        "slot_mapping": table[:, -1] * batch.block_size + batch.block_size - 1,
        "block_table": table,
        "query_start": np.arange(calls + 1, dtype=np.int32),
        "context_lens": np.full(calls, KEYS - 1, np.int32),
        "collect_stats": np.array(batch.collect_stats),
        "key_shift": batch.shift[None],
    }
    with np.errstate(invalid="ignore", over="ignore"):
        inputs["key_screen"] = screen_of_cache(caches["key_cache"].astype(TYPES[batch.dtype][0]), batch.shift[None])
    if batch.slopes is not None:
        inputs["alibi_slopes"] = batch.slopes
    assert caches["key_cache"].shape[2] == size
    return Case("entmax", inputs, batch.attributes)


def expected_outputs(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the float64 outputs [calls, group, VALUE_DIM] and the tolerance of float32 results [calls, group].

    The tolerance is the effect on the weights of an error of the logits, a few 2^-24 |q| |k| as in a float32 sum. The
    tolerance is small except where float32 cannot tell logits apart.
    """
    query, keys = batch.query.astype(np.float64), batch.keys.astype(np.float64)
    alpha, cap = batch.attributes["alpha"], batch.attributes["softcap"]
    with np.errstate(invalid="ignore", over="ignore"):
        z = query @ keys.swapaxes(1, 2)
        error = 4 * 2.0**-24 * np.linalg.norm(query, axis=2)[..., None]
        error = error * np.linalg.norm(keys, axis=2)[:, None]
        if cap:
            lower, upper = (cap * np.tanh((z + sign * error) / cap) for sign in (-1, 1))
            z, error = cap * np.tanh(z / cap), upper - lower + cap * 2.0**-22
        if batch.slopes is not None:
            bias = batch.slopes.astype(np.float64)[:, None] * np.arange(1 - KEYS, 1)
            z, error = z + bias, error + 2.0**-23 * np.abs(bias)
        lost = ~(z.max(2) < np.inf)  # a NaN or +infinity among the logits makes the row NaN
        z = np.where(lost[..., None], 0.0, z)
        error = np.where(np.isfinite(error), error, 0.0)
    weights = entmax(z, alpha)
    output = weights @ batch.values.astype(np.float64)
    output[lost] = np.nan
    near = z > z.max(2, keepdims=True) - 1 / (alpha - 1) - 2 * error
    of_logits = np.where(near, error, 0).max(2)
    alone = near.sum(2) == 1
    return output, np.where(alone, 0, 2 * of_logits * near.sum(2) ** 0.5) + 2e-6


def entmax(z: np.ndarray, alpha: float) -> np.ndarray:
    """Return entmax weights [..., keys] for alpha <= 2.

    Newton's method runs on (sum of weights)^(alpha - 1), which is convex in the threshold.
    """
    s = (alpha - 1) * (z - z.max(-1, keepdims=True))
    power = 1 / (alpha - 1)
    threshold = np.full((*z.shape[:-1], 1), -1.0)
    for _ in range(60):
        above = np.maximum(s - threshold, 0)
        lower = above ** (power - 1) if power > 1 else (above > 0).astype(float)
        total = (lower * above).sum(-1, keepdims=True)
        step = total * (1 - total ** -(1 / power)) / lower.sum(-1, keepdims=True)
        threshold += step
        if np.abs(step).max() < 1e-15:
            break
    weights = np.maximum(s - threshold, 0) ** power
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-9)
    return weights


def check(batch: Batch, case: Case | None = None) -> None:
    """Assert that the batch gives the same bits with the screen and without, and that they agree with float64.

    `case`, if given, is called in place of the batch's own case.

    Raises:
        AssertionError: An output or a statistic differs.
    """
    case = case or as_case(batch)
    found, without = run(case, batch.dtype), run(case, batch.dtype, screen=False)
    np.testing.assert_array_equal(found.output, without.output)
    np.testing.assert_array_equal(found.stats, without.stats)
    expected, tolerance = expected_outputs(batch)
    if not (batch.attributes["softcap"] and batch.slopes is not None):  # keys too far off to have a weight are not read
        np.testing.assert_array_equal(np.isnan(found.output), np.isnan(expected))
    off = np.nan_to_num(np.abs(found.output - expected)).max(2) / np.abs(batch.values).max()
    wrong = [f"{batch.kinds[call]}: {off[call, row]:.1e}" for call, row in np.argwhere(off > tolerance)]
    assert not wrong, f"differ from float64: {', '.join(wrong[:5])}"


def main() -> None:
    """`python -m tests.plugins.conformance.screened_batches --batches 80 --output FILE`."""
    parser = ArgumentParser(description=main.__doc__)
    parser.add_argument("--batches", type=int, default=80)
    parser.add_argument("--calls", type=int, default=125, help="of a batch")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    wrong = []
    began = time.monotonic()
    for seed in range(arguments.batches):
        batch = make_batch(seed, arguments.calls)
        counts.update(batch.kinds)
        try:
            check(batch)
        except AssertionError as error:
            wrong.append({"seed": seed, "error": str(error)})
            print(seed, error)
    total = counts.total()
    print(f"{total:,} calls, {len(wrong)} batches wrong, {time.monotonic() - began:.0f} s")
    result = {
        **header("key_screen_calls"),
        "command": " ".join(["python -m tests.plugins.conformance.screened_batches", *sys.argv[1:]]),
        "calls": total,
        "wrong": wrong,
        "rows": [{"kind": kind, "calls": counts[kind]} for kind in KINDS],
    }
    write(arguments.output, result)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
