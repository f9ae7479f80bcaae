"""NaN, Inf, out-of-range values and shapes: every outcome is defined, and none is a hang or a wrong read.

A key with NaN makes the rows that see it NaN. A key with infinity gives a logit of +-infinity, or NaN against a zero:
+infinity makes the row NaN under every normalizer that divides by a sum, -infinity is a weight of 0. A row whose
visible logits are all -infinity cannot have weights and is NaN, too. Rows that do not see the key stay as they are.
"""

import numpy as np
import pytest

from sharp.plugins.op.schema import NORMALIZERS
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, make_case, run, run_reference

DIVIDING = ("softmax", "ssa", "adaptive_softmax", "entmax")
PROMPT = Shape(sequences=((5, 60),), kv_heads=2, group=2, head_dim=16, value_dim=16)
LONG = Shape(sequences=((2500, 2),), kv_heads=1, group=2, head_dim=16, value_dim=16)


def with_key(case: Case, position: int, number: float) -> Case:
    """Return the case with `number` in every channel of one stored key of its only sequence, and positive queries."""
    table, cache = case.inputs["block_table"], case.inputs["key_cache"].copy()
    cache[table[0, position // 16], :, :, position % 16] = number
    return case.with_inputs(key_cache=cache, query=np.abs(case.inputs["query"]) + 0.1)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("normalizer", [*DIVIDING, "softpick"])
def test_a_key_that_is_nan_or_infinite_makes_the_rows_that_see_it_nan(normalizer: str, number: float) -> None:
    case = with_key(make_case(normalizer, LONG), 1200, number)
    assert np.isnan(run(case, kernel=True).output).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_rows_whose_window_excludes_the_key_stay_as_they_are(normalizer: str, number: float) -> None:
    case = make_case(normalizer, LONG, window=40)
    spoilt = with_key(case, 1200, number)
    clean = case.with_inputs(query=spoilt.inputs["query"])
    np.testing.assert_array_equal(run(spoilt, kernel=True).output, run(clean, kernel=True).output)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_value_that_is_nan_reaches_only_the_rows_that_see_it(normalizer: str, number: float) -> None:
    """A NaN in a value reaches no row that cannot see its key. Once earlier tokens became NaN, as 0 * NaN = NaN."""
    case = make_case(normalizer, PROMPT, window=20)
    clean, value = run_reference(case).output, case.inputs["value"].copy()
    value[30] = number
    with np.errstate(invalid="ignore"):
        spoilt = case.with_inputs(value=value)
        actual, expected = run(spoilt, kernel=True).output, run_reference(spoilt).output
    blind = np.r_[:30, 50:60]
    assert np.isfinite(expected[blind]).all() and not np.isfinite(actual[30]).all()
    np.testing.assert_allclose(actual[blind], clean[blind], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalizer", ["entmax", "relu", "relu2", "softpick"])
def test_a_value_that_is_nan_is_left_out_where_the_normalizer_drops_its_key(normalizer: str) -> None:
    case = make_case(normalizer, LONG, scale=0.5)
    table, cache = case.inputs["block_table"], case.inputs["value_cache"].copy()
    held = np.nan_to_num(cache[table[0, 0], :, 3])
    for position in range(3, 2400, 16):  # find a position whose key is dropped: a huge value there changes no row
        cache[table[0, position // 16], :, 3] = 1e30
        if np.abs(run_reference(case.with_inputs(value_cache=cache)).output).max() < 1e20:
            break
        cache[table[0, position // 16], :, 3] = held
    spoilt = case.with_inputs(value_cache=np.where(cache == np.float32(1e30), np.nan, cache))
    expected = run_reference(spoilt)
    assert np.isnan(spoilt.inputs["value_cache"][table[0, position // 16], :, 3]).all()
    assert np.isfinite(expected.output).all()
    assert_agrees(run(spoilt, kernel=True), expected, spoilt, tolerance=1e-4)


@pytest.mark.parametrize("normalizer", ["softmax", "adaptive_softmax", "entmax", "ssa"])
def test_a_key_of_minus_infinity_has_no_weight(normalizer: str) -> None:
    spoilt = with_key(make_case(normalizer, LONG), 1200, -np.inf)
    holes = spoilt.inputs["key_cache"].copy()
    holes[~np.isfinite(holes)] = -1e4  # far below every other logit
    far = run(spoilt.with_inputs(key_cache=holes), kernel=True).output
    # Under ssa a logit of -10,000 keeps some weight, so the test only requires that outputs are finite.
    tolerance = 1e-5 if normalizer != "ssa" else 1.0
    np.testing.assert_allclose(run(spoilt, kernel=True).output, far, atol=tolerance)


@pytest.mark.parametrize("normalizer", DIVIDING)
def test_a_row_that_sees_minus_infinity_only_is_nan(normalizer: str) -> None:
    case = with_key(make_case(normalizer, Shape(sequences=((0, 1),), kv_heads=1)), 0, 0.0)
    key = np.full_like(case.inputs["key"], -np.inf)
    assert np.isnan(run(case.with_inputs(key=key), kernel=True).output).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_logits_of_ten_thousand(normalizer: str, sign: int) -> None:
    # Whole numbers keep the logits exact in float32.
    shape = Shape(sequences=((300, 3), (0, 1)), integers=True)
    case = make_case(normalizer, shape, scale=1e3)
    case = case.with_inputs(query=sign * case.inputs["query"])
    expected = run_reference(case)
    if np.abs(expected.output).max() < 1e30:
        assert_agrees(run(case, kernel=True), expected, case)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_sequence_whose_blocks_are_all_holes_gives_zeros(normalizer: str) -> None:
    case = make_case(normalizer, LONG)
    result = run(case.with_inputs(block_table=np.full_like(case.inputs["block_table"], -1)), kernel=True)
    assert not result.output.any()
    assert not result.stats.any()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_one_token_alone(normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((0, 1),), kv_heads=1, group=1, head_dim=1, value_dim=1, block_size=1))
    assert_agrees(run(case, kernel=True), run_reference(case), case)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_no_tokens_at_all(normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((5, 0), (0, 0))))
    assert run(case, kernel=True).output.shape == (0, 6, 12)
    without_blocks = {
        name: case.inputs[name][:0] for name in ("key_cache", "value_cache", "block_table", "context_lens")
    }
    nothing = case.with_inputs(**without_blocks, query_start=np.zeros(1, np.int32))
    assert run(nothing, kernel=True).key_cache.shape == (0, 2, 8, 16)


@pytest.mark.parametrize("alpha", [1.001, 1.5, 2.0, 4.0])
def test_equal_logits_share_the_weight_equally(alpha: float) -> None:
    # Every key is in the support, and the threshold lies at the end of its bracket.
    case = make_case("entmax", LONG, alpha=alpha)
    equal = case.with_inputs(query=np.zeros_like(case.inputs["query"]))
    expected = run_reference(equal)
    np.testing.assert_allclose(run(equal, kernel=True).output, expected.output, atol=2e-4 if alpha > 2 else 2e-5)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize(("group", "new"), [(1, 1), (3, 2), (3, 40), (8, 1)])
def test_rows_that_give_weight_to_most_keys(group: int, new: int, alpha: float) -> None:
    """Values of rows that give weight to most keys are streamed with the tile's other rows instead of gathered."""
    shape = Shape(sequences=((2500, new), (0, 3)), kv_heads=1, group=group, head_dim=16, value_dim=24)
    case = make_case("entmax", shape, alpha=alpha, scale=0.0001)
    sharp_rows = case.inputs["query"].copy()
    sharp_rows[:, 1::2] *= 500
    for variant in (case, case.with_inputs(query=sharp_rows)):
        expected = run_reference(variant)
        assert expected.stats[0, 0, 1] > 0.6 * 2500
        assert_agrees(run(variant, kernel=True), expected, variant)


def test_a_value_that_is_nan_is_left_out_of_rows_whose_values_are_streamed() -> None:
    shape = Shape(sequences=((2500, 1),), kv_heads=1, group=3, head_dim=16, value_dim=24)
    case = with_key(make_case("entmax", shape, scale=0.02), 1200, -100.0)
    table, cache = case.inputs["block_table"], case.inputs["value_cache"].copy()
    cache[table[0, 1200 // 16], :, 1200 % 16] = np.nan
    spoilt = case.with_inputs(value_cache=cache)
    expected = run_reference(spoilt)
    assert np.isfinite(expected.output).all() and (expected.stats[..., 1] > 2500 / 6).all()
    assert_agrees(run(spoilt, kernel=True), expected, spoilt)
