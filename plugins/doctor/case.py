"""A small random call of PagedAttention, its result in float64, and how far a backend may be from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.ops import e4m3
from sharp.plugins.ops.attributes import SCALED_CACHES
from sharp.plugins.ops.normalizers import Normalizer
from sharp.plugins.ops.reference import AttentionOutput, paged_attention

NORMALIZERS = ("softmax", "ssa", "adaptive_softmax", "entmax")
# Context and new tokens of each sequence: decoding over a long and no context, a chunk, a prompt.
SEQUENCES = ((300, 1), (0, 1), (33, 5), (0, 40))
KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 2, 3, 64, 16
STATISTICS = ("entropy", "support", "inverse_temperature", "logit_spread")
# Of the output ||found - expected|| / ||expected||, by the type of the call: that type's rounding. Of statistics the
# largest difference: nats, keys, none, none.
OUTPUT_LIMITS = {"float32": 1e-5, "float16": 2e-3, "int8": 1e-5, "fp8": 1e-5, "float16/int8": 2e-3}
STATISTICS_LIMITS = {"entropy": 2e-3, "support": 2.0, "inverse_temperature": 2e-3, "logit_spread": 4e-3}


@dataclass(frozen=True)
class Case:
    """Inputs by name, as `schema.PAGED_ATTENTION` has them, of type `dtype`; the attributes; the output in float64.

    int8 and fp8 are those of the caches, under float32 or the type before the stroke.
    """

    normalizer: str
    dtype: str
    inputs: Mapping[str, NDArray[Any]]
    attributes: Mapping[str, float]
    expected: AttentionOutput = field(repr=False)


def make_case(normalizer: str, dtype: str) -> Case:
    """The case of a normalizer, the same in every run; unused slots hold NaN, which nothing may read."""
    rng = np.random.default_rng(7)
    counts = [-(-(context + new) // BLOCK_SIZE) for context, new in SEQUENCES]
    order = rng.permutation(sum(counts) + 1)
    table = np.full((len(counts), max(counts)), -1, np.int32)
    slots: list[int] = []
    tokens = sum(new for _, new in SEQUENCES)
    key_cache = np.full((len(order), KV_HEADS, HEAD_DIM, BLOCK_SIZE), np.nan)
    value_cache = np.full((len(order), KV_HEADS, BLOCK_SIZE, HEAD_DIM), np.nan)
    for sequence, (context, new) in enumerate(SEQUENCES):
        first = sum(counts[:sequence])
        table[sequence, : counts[sequence]] = order[first : first + counts[sequence]]
        for position in range(context + new):
            block, offset = int(table[sequence, position // BLOCK_SIZE]), position % BLOCK_SIZE
            if position < context:
                key_cache[block, :, :, offset] = rng.standard_normal((KV_HEADS, HEAD_DIM))
                value_cache[block, :, offset] = rng.standard_normal((KV_HEADS, HEAD_DIM))
            else:
                slots.append(block * BLOCK_SIZE + offset)
    floats = {
        "query": rng.standard_normal((tokens, KV_HEADS * GROUP, HEAD_DIM)),
        "key": rng.standard_normal((tokens, KV_HEADS, HEAD_DIM)),
        "value": rng.standard_normal((tokens, KV_HEADS, HEAD_DIM)),
        "key_cache": key_cache,
        "value_cache": value_cache,
    }
    cache = dtype.rpartition("/")[2]
    scaled_cache = cache in SCALED_CACHES
    type_ = np.dtype(np.float32 if dtype == cache and scaled_cache else dtype.partition("/")[0])
    inputs: dict[str, NDArray[Any]] = {name: array.astype(type_) for name, array in floats.items()}
    inputs |= {
        "slot_mapping": np.array(slots, np.int32),
        "block_table": table,
        "query_start": np.cumsum([0, *(new for _, new in SEQUENCES)], dtype=np.int32),
        "context_lens": np.array([context for context, _ in SEQUENCES], np.int32),
    }
    if normalizer == "ssa":
        inputs["head_params"] = rng.uniform((0.3, 1.0), (1.5, 2.0), (KV_HEADS * GROUP, 2)).astype(np.float32)
    inputs["collect_stats"] = np.array(True)
    for kind in ("key", "value") if scaled_cache else ():
        numbers = np.nan_to_num(floats[f"{kind}_cache"])
        largest = np.maximum(np.abs(numbers).max((2, 3)), 1.0)
        scale = largest / 127 if cache == "int8" else e4m3.scale_of(largest)
        scaled = numbers / scale[:, :, None, None]
        inputs[f"{kind}_cache"] = np.rint(scaled).astype(np.int8) if cache == "int8" else e4m3.encode(scaled)
        inputs[f"{kind}_scale"] = scale.astype(np.float32)
    attributes = {"scale": 2.0 * HEAD_DIM**-0.5}
    exact = {
        name: array.astype(np.float64) if name in floats and array.itemsize > 1 else array
        for name, array in inputs.items()
    }
    expected = paged_attention(**exact, normalizer=Normalizer(normalizer), **attributes)  # type: ignore[arg-type]
    return Case(normalizer, dtype, inputs, attributes, expected)


def errors(case: Case, found: AttentionOutput) -> dict[str, float]:
    """How far a result is from the expected one: output, numbers of the caches that differ, statistics.

    What was there and what is new in the caches must be equal, and slots that nobody wrote must still be NaN.
    """
    expected = case.expected
    difference = np.linalg.norm(found.output.astype(np.float64) - expected.output)
    different = 0
    for name in ("key_cache", "value_cache", "key_scale", "value_scale"):
        a, b = getattr(found, name), getattr(expected, name)
        if b is not None:
            different += int((~((a == b) | (np.isnan(a) & np.isnan(b)))).sum())
    statistics = np.abs(found.stats - expected.stats).reshape(-1, len(STATISTICS)).max(0)
    return {
        "output": float(difference / np.linalg.norm(expected.output)),
        "caches": float(different),
        **{name: float(value) for name, value in zip(STATISTICS, statistics, strict=True)},
    }


def limits(case: Case) -> dict[str, float]:
    """What `errors` may be at most."""
    return {"output": OUTPUT_LIMITS[case.dtype], "caches": 0.0, **STATISTICS_LIMITS}
