"""A small random call of PagedAttention, its result in float64, and the limits of a backend's errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.op import e4m3
from sharp.plugins.op.attributes import HEAD_PARAMETERS, SCALED_CACHES
from sharp.plugins.op.normalizers import Normalizer
from sharp.plugins.op.reference import AttentionOutput, paged_attention

# Context and new tokens of each sequence: decoding with a long and with no context, a chunk, a prompt.
SEQUENCES = ((300, 1), (0, 1), (33, 5), (0, 40))
# The ranges of the random columns of head_params.
COLUMN_RANGES = {"b": (0.3, 1.5), "n": (1.0, 2.0), "bias": (-1.0, 1.0), "power": (0.5, 1.0)}
KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 2, 3, 64, 16
STATISTICS = ("entropy", "support", "inverse_temperature", "logit_spread")
# Limits of ||found - expected|| / ||expected|| for the output, by the type of the call: the rounding of that type.
# Limits of the largest difference of each statistic, in nats, keys, and for the last two without unit.
OUTPUT_LIMITS = {"float32": 1e-5, "float16": 2e-3, "int8": 1e-5, "fp8": 1e-5, "float16/int8": 2e-3}
STATISTICS_LIMITS = {"entropy": 2e-3, "support": 2.0, "inverse_temperature": 2e-3, "logit_spread": 4e-3}


@dataclass(frozen=True)
class Case:
    """A call: inputs by their names in `schema.PAGED_ATTENTION`, attributes, and the expected output in float64.

    `dtype` is the type of the inputs. int8 and fp8 are types of the caches; the other inputs are then float32, or of
    the type before the slash.
    """

    normalizer: str
    dtype: str
    inputs: Mapping[str, NDArray[Any]]
    attributes: Mapping[str, float]
    expected: AttentionOutput = field(repr=False)


def make_case(normalizer: str, dtype: str) -> Case:
    """Return the case of one of Sharp's normalizers, which is the same in every run.

    `dtype` is a key of `OUTPUT_LIMITS`: float32, float16, int8, fp8 or float16/int8. Unused slots hold NaN, which
    nothing may read; in caches of int8 and fp8 they hold 0.
    """
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
    if columns := HEAD_PARAMETERS.get(normalizer):
        low, high = np.array([COLUMN_RANGES[column] for column in columns]).T
        inputs["head_params"] = rng.uniform(low, high, (KV_HEADS * GROUP, len(columns))).astype(np.float32)
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
    """Return the errors of a result by name.

    "output" is ||found - expected|| / ||expected||, "caches" the number of entries of caches and scales that differ
    (NaN equals NaN), and entropy, support, inverse_temperature and logit_spread are the largest absolute differences.
    The error of an output or a statistic that is NaN is NaN.
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
    """Return the largest allowed values of `errors(case, ...)`, by the same names."""
    return {"output": OUTPUT_LIMITS[case.dtype], "caches": 0.0, **STATISTICS_LIMITS}
