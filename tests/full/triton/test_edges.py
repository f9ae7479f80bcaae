"""NaN, Inf, out-of-range values and shapes in the Triton kernels: every outcome is defined.

`tests/plugins/conformance/test_kernel_edges.py` has the tests of the other kernels.
"""

import numpy as np
import pytest

from sharp.plugins.op.schema import NORMALIZERS
from tests.full.triton.interpreted import Run
from tests.plugins.conformance.cases import Shape, assert_agrees, int8_case, make_case, run_reference
from tests.plugins.conformance.test_kernel_edges import DIVIDING, with_key

# A decode row, rows of few tokens and a chunk over the same kind of context, in the middle of which a test puts its
# key.
DECODE = Shape(sequences=((300, 1),), kv_heads=1, group=2, head_dim=16, value_dim=16)
FEW = Shape(sequences=((300, 3),), kv_heads=1, group=2, head_dim=16, value_dim=16)
CHUNK = Shape(sequences=((150, 9),), kv_heads=1, group=2, head_dim=16, value_dim=16)
SHAPES = {"decode": DECODE, "few": FEW, "chunk": CHUNK}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("normalizer", DIVIDING)
def test_a_key_that_is_nan_or_infinite_makes_the_rows_that_see_it_nan(
    run: Run, normalizer: str, number: float, shape: str
) -> None:
    result = run(with_key(make_case(normalizer, SHAPES[shape]), 60, number))
    assert np.isnan(result.output).all()
    assert np.isnan(result.stats).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_rows_whose_window_excludes_the_key_stay_as_they_are(run: Run, normalizer: str, shape: str) -> None:
    case = make_case(normalizer, SHAPES[shape], window=40)
    spoilt = with_key(case, 60, np.nan)
    clean = case.with_inputs(query=spoilt.inputs["query"])
    np.testing.assert_array_equal(run(spoilt).output, run(clean).output)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", DIVIDING)
def test_a_key_of_minus_infinity_has_no_weight(run: Run, normalizer: str, shape: str) -> None:
    case = make_case(normalizer, SHAPES[shape])
    spoilt = with_key(case, 60, -np.inf)
    # The key counts as absent, like a hole of one key, although the other keys of its block remain.
    values = spoilt.inputs["value_cache"].copy()
    values[spoilt.inputs["block_table"][0, 3], :, 60 % 16] = 1e6  # would show in the output with any weight
    result = run(spoilt.with_inputs(value_cache=values)).output
    assert np.abs(result).max() < 10


@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("normalizer", DIVIDING)
def test_a_row_that_sees_minus_infinity_only_is_nan(run: Run, normalizer: str, tokens: int) -> None:
    case = with_key(make_case(normalizer, Shape(sequences=((0, tokens),), kv_heads=1, head_dim=16)), 0, 0.0)
    key = np.full_like(case.inputs["key"], -np.inf)
    assert np.isnan(run(case.with_inputs(key=key)).output).all()


@pytest.mark.parametrize("tokens", [3, 17])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("normalizer", DIVIDING)
def test_a_query_that_is_no_number_spoils_its_row_only(run: Run, normalizer: str, bad: float, tokens: int) -> None:
    case = make_case(normalizer, Shape(sequences=((40, tokens),), kv_heads=1, group=1, head_dim=16))
    query = case.inputs["query"].copy()
    query[1] = bad
    result, expected = run(case.with_inputs(query=query)), run_reference(case)
    np.testing.assert_allclose(result.output[[0, 2]], expected.output[[0, 2]], atol=1e-5)
    assert np.isnan(result.output[1]).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_logits_of_ten_thousand(run: Run, normalizer: str, sign: int) -> None:
    # Whole numbers make the logits exact in float32.
    case = make_case(normalizer, Shape(sequences=((100, 2), (70, 1), (60, 6)), kv_heads=1, integers=True), scale=1e3)
    case = case.with_inputs(query=case.inputs["query"] * np.float32(sign))
    assert_agrees(run(case), run_reference(case), case)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_sequence_whose_blocks_are_all_holes_gives_zeros(run: Run, normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((20, 1), (20, 2), (20, 17)), kv_heads=1, group=1))
    result = run(case.with_inputs(block_table=np.full_like(case.inputs["block_table"], -1)))
    assert not result.output.any()
    assert not result.stats.any()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_one_token_alone(run: Run, normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((0, 1),), kv_heads=1, group=1, head_dim=1, value_dim=1))
    assert_agrees(run(case), run_reference(case), case)


def test_no_tokens_at_all(run: Run) -> None:
    assert run(make_case("softmax", Shape(sequences=((5, 0), (0, 0))))).output.shape == (0, 6, 12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", ["softmax", "entmax"])
def test_a_context_longer_than_the_table_does_not_wrap_around(run: Run, normalizer: str, shape: str) -> None:
    # A CPU kernel refuses this context; a GPU's host cannot see it.
    case = make_case(normalizer, SHAPES[shape], window=9)
    places = 16 * case.inputs["block_table"].shape[1]
    full, longer = (
        run(case.with_inputs(context_lens=np.array([context], np.int32))) for context in (places, 2**31 - 2)
    )
    np.testing.assert_array_equal(longer.output, full.output)
    assert np.isfinite(full.output).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", ["softmax", "entmax"])
def test_a_block_that_the_cache_does_not_have_is_a_hole(run: Run, normalizer: str, shape: str) -> None:
    # A CPU kernel refuses this block; a GPU's host cannot see it. The memory check fails if a kernel reads beside the
    # caches.
    case = make_case(normalizer, SHAPES[shape])
    tables = [case.inputs["block_table"].copy() for _ in range(2)]
    for table, blocks in zip(tables, ((-1, -1), (len(case.inputs["key_cache"]), 2**31 - 1)), strict=True):
        table[0, 2], table[0, 5] = blocks
    hole, behind = (run(case.with_inputs(block_table=table)) for table in tables)
    np.testing.assert_array_equal(behind.output, hole.output)
    assert np.isfinite(hole.output).all()


@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
def test_a_slot_that_the_cache_does_not_have_is_not_stored(run: Run, cache_dtype: str) -> None:
    case = make_case("softmax", FEW)
    case = int8_case(case) if cache_dtype == "int8" else case
    stored = [case.inputs["slot_mapping"].copy() for _ in range(2)]
    slots = len(case.inputs["key_cache"]) * 16
    for mapping, wrong in zip(stored, ((-1, -1), (slots, 2**31 - 1)), strict=True):
        mapping[0], mapping[2] = wrong
    without, behind = (run(case.with_inputs(slot_mapping=mapping), "float32", cache_dtype) for mapping in stored)
    for name in ("output", "key_cache", "value_cache"):
        np.testing.assert_array_equal(getattr(behind, name), getattr(without, name))


@pytest.mark.parametrize("alpha", [1.001, 1.5, 4.0])
def test_equal_logits_share_the_weight_equally(run: Run, alpha: float) -> None:
    # Every key is in the support and the threshold lies at the end of its bracket.
    case = make_case("entmax", Shape(sequences=((150, 1), (60, 2), (50, 6)), kv_heads=1, head_dim=16), alpha=alpha)
    equal = case.with_inputs(query=np.zeros_like(case.inputs["query"]))
    np.testing.assert_allclose(run(equal).output, run_reference(equal).output, atol=2e-4 if alpha > 2 else 2e-5)


def test_entmax_leaves_out_tiles_that_no_row_gives_a_weight(run: Run) -> None:
    case = make_case("entmax", Shape(sequences=((300, 9),), kv_heads=1, group=2, head_dim=16, value_dim=16))
    blocks = case.inputs["block_table"][0, 64 // 16 : 256 // 16]  # as many keys as one chunk of the list has
    keys, values = case.inputs["key_cache"].copy(), case.inputs["value_cache"].copy()
    keys[blocks], values[blocks] = -9.0, 0.0
    case = case.with_inputs(query=np.abs(case.inputs["query"]) + 1, key_cache=keys, value_cache=values)
    spoilt = values.copy()
    spoilt[blocks] = np.nan  # would show if multiplied by a weight of 0
    result, expected = run(case.with_inputs(value_cache=spoilt)), run_reference(case)
    np.testing.assert_allclose(result.output, expected.output, atol=1e-5)
    np.testing.assert_allclose(result.stats, expected.stats, rtol=1e-5, atol=1e-5)
