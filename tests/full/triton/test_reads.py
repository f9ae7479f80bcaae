"""How often a call reads its cache: what bounds decoding and questions about long texts."""

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
        ("softmax", 4, 8, 2, 2),  # two tiles, whose programs run beside each other
        ("softmax", 32, 4, 1, 1),  # one tile, its keys in parts
        ("softmax", 16, 8, 1, 1),
        ("ssa", 32, 4, 1, 1),
        ("adaptive_softmax", 32, 4, 2, 1),  # in parts, too: for their temperatures first
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
