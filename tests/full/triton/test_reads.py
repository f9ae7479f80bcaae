"""Counts of how often a call reads its cache, which bounds the speed of decoding and of questions about long texts."""

from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from tests.full.triton import interpreted
from tests.plugins.conformance.cases import Shape, make_case


@pytest.mark.parametrize(
    ("normalizer", "tokens", "group", "keys", "values"),
    [
        ("softmax", 1, 4, 1, 1),
        ("softmax", 4, 4, 1, 1),
        ("adaptive_softmax", 4, 4, 1, 1),
        ("entmax", 4, 4, 1, 1),
        ("softmax", 4, 8, 2, 2),  # two tiles, whose programs read the cache independently
        ("softmax", 32, 4, 1, 1),  # one tile, whose keys are split into parts
        ("softmax", 16, 8, 1, 1),
        ("ssa", 32, 4, 1, 1),
        ("adaptive_softmax", 32, 4, 2, 1),  # in parts, too, once for the temperatures and once for the outputs
    ],
)
def test_the_cache_is_read_once(
    interpreter: ProcessPoolExecutor, normalizer: str, tokens: int, group: int, keys: int, values: int
) -> None:
    shape = Shape(sequences=((1200, tokens),), kv_heads=1, group=group, head_dim=16, value_dim=16)
    case = make_case(normalizer, shape).with_inputs(collect_stats=np.array(False))
    found = interpreter.submit(interpreted.cache_reads, case, "bfloat16", 256).result()
    assert keys - 0.01 <= found[0] <= keys * 1.1
    assert found[1] <= values * 1.1


@pytest.mark.parametrize(("sharp", "keys", "values"), [(True, (1.1, 1.5), 0.15), (False, (3.1, 5.2), 1.1)])
def test_entmax_reads_again_what_may_get_a_weight(
    interpreter: ProcessPoolExecutor, sharp: bool, keys: tuple[float, float], values: float
) -> None:
    # There are two parts of 16 tiles of keys. Each part also reads the first and the last tile for their largest
    # logits.
    shape = Shape(sequences=((4064, 32),), kv_heads=1, group=4, head_dim=16, value_dim=16)
    case = make_case("entmax", shape).with_inputs(collect_stats=np.array(False))
    query, cache = case.inputs["query"] * 0, case.inputs["key_cache"].copy()
    if sharp:  # like a text whose first tokens get most of the weight
        query = np.abs(case.inputs["query"]) + 1
        cache[case.inputs["block_table"][0, 128 // 16 : 4064 // 16]] = -9.0
    case = case.with_inputs(query=query, key_cache=cache)
    found = interpreter.submit(interpreted.cache_reads, case, "bfloat16", 2048).result()
    assert keys[0] <= found[0] <= keys[1]
    assert found[1] <= values
