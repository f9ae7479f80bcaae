"""Keys that the screen leaves out have no weight: results with and without a screen are equal, bit for bit."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.plugins.op.key_screen import in_doubt, intervals, pack, screen_bytes, screen_of, store_screen, unpack
from sharp.plugins.op.normalizers import entmax
from sharp.plugins.op.reference import AttentionOutput
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, run_reference
from tests.plugins.conformance.screened import LONG, TYPES, poisoned, run, screened_case, with_screen
from tests.plugins.conformance.screened_batches import as_case, check, make_batch

DECODE = Shape(sequences=((2000, 1),), kv_heads=1, group=3, head_dim=64, value_dim=16)


def assert_same(actual: AttentionOutput, expected: AttentionOutput) -> None:
    for name in ("output", "key_cache", "value_cache", "stats"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)


def assert_same_as_without(case: Case, dtype: str = "float32") -> AttentionOutput:
    with_it = run(case, dtype)
    assert_same(with_it, run(case, dtype, screen=False))
    silent = case.with_inputs(collect_stats=np.array(False))
    assert_same(run(silent, dtype), run(silent, dtype, screen=False))
    return with_it


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("options", [{}, {"softcap": 8.0}, {"alibi": True}, {"window": 1500}, {"causal": 0}])
def test_long_contexts(options: dict[str, float], alpha: float) -> None:
    case = screened_case(alpha=alpha, **options)  # type: ignore[arg-type]
    result = assert_same_as_without(case)
    assert_agrees(result, run_reference(case), case, tolerance=5e-5 if alpha <= 2 else 5e-4)


def assert_leaves_out_keys(case: Case, dtype: str) -> None:
    """Assert that NaN in keys that the screen leaves out changes nothing, but does so without the screen."""
    for collect in (False, True):
        asked = case.with_inputs(collect_stats=np.array(collect))
        with_nan, strips = poisoned(asked, dtype)
        assert strips > 20
        actual, expected = run(with_nan, dtype), run(asked, dtype, screen=False)
        np.testing.assert_array_equal(actual.output, expected.output)
        np.testing.assert_array_equal(actual.stats, expected.stats)
        assert np.isnan(run(with_nan, dtype, screen=False).output).any()


def multiplies_by_amx() -> bool:
    """Whether this process's kernels use AMX for bfloat16 and more than 6 rows, a loop that ignores the screen."""
    return os.environ.get("SHARP_ISA", "amx") == "amx" and "amx_bf16" in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 21])
@pytest.mark.parametrize("group", [1, 3, 6, 8])
def test_shapes_of_heads(head_dim: int, group: int, dtype: str) -> None:
    shape = replace(LONG, sequences=((1100, 1), (600, 2)), head_dim=head_dim, group=group, value_dim=head_dim)
    case = with_screen(screened_case(shape, scale=8 * head_dim**-0.5), dtype)
    query = case.inputs["query"]
    # Queries are alike, so that all rows together still leave out most strips.
    alike = case.with_inputs(query=(query[:1, :1] + 0.1 * query).astype(np.float32))
    assert_same_as_without(alike, dtype)
    if dtype != "bfloat16" or group <= 3 or not multiplies_by_amx():
        assert_leaves_out_keys(alike, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 24])
def test_types_and_blocks(dtype: str, block_size: int) -> None:
    case = with_screen(screened_case(replace(LONG, block_size=block_size, holes=True, drop_slots=True)), dtype)
    result = assert_same_as_without(case, dtype)
    assert_agrees(result, run_reference(case), case, tolerance=5e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_keys_are_left_out_of_blocks_of_any_size(dtype: str, block_size: int) -> None:
    shape = replace(LONG, sequences=((1100, 1), (3000, 1)), block_size=block_size)
    assert_leaves_out_keys(with_screen(screened_case(shape, scale=1.0), dtype), dtype)


@given(
    context=st.integers(0, 1400),
    new=st.integers(1, 9),
    group=st.sampled_from((1, 2, 3, 4)),
    head_dim=st.sampled_from((5, 16, 64)),
    seed=st.integers(0, 2**20),
    integers=st.booleans(),
    holes=st.booleans(),
    scale=st.sampled_from((0.05, 0.3, 2.0, 256.0)),
    alpha=st.sampled_from((1.2, 1.5, 2.0)),
)
def test_random_calls(
    context: int,
    new: int,
    group: int,
    head_dim: int,
    seed: int,
    integers: bool,
    holes: bool,
    scale: float,
    alpha: float,
) -> None:
    # `scale` and `integers` give equal logits, a weight for all keys, or a weight for one key alone.
    shape = Shape(((context, new),), 1, group, head_dim, 8, integers=integers, holes=holes)
    case = screened_case(shape, seed, shift=bool(seed % 2), alpha=alpha, scale=scale)
    assert_same_as_without(case)


@pytest.mark.parametrize("seed", range(9))
def test_adversarial_calls(seed: int) -> None:
    check(make_batch(seed, 36))


def test_a_screen_that_is_wrong_is_found() -> None:
    batch = make_batch(3, 36)
    case = as_case(batch)
    bound = unpack(case.inputs["key_screen"], batch.keys.shape[2], batch.block_size)
    wrong = replace(bound, integers=-bound.integers, distance=np.full_like(bound.distance, 1e-9))
    with pytest.raises(AssertionError, match="not equal"):
        check(batch, case.with_inputs(key_screen=pack(wrong)))


def spoilt(case: Case, number: float, channel: int = 3, key: int = 777) -> Case:
    """Return the case with `number` in one channel of one key of the past."""
    cache = case.inputs["key_cache"].copy()
    cache[case.inputs["block_table"][0, key // 16], :, channel, key % 16] = number
    return with_screen(case.with_inputs(key_cache=cache))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e30, -3e38, 1e-42, 1e19])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_key_with_any_number_in_it(number: float, softcap: float) -> None:
    assert_same_as_without(spoilt(screened_case(DECODE, softcap=softcap), number))


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e20, 3e38, 1e-42])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_query_with_any_number_in_it(number: float) -> None:
    case = screened_case(replace(DECODE, sequences=((2000, 2),)))
    query = case.inputs["query"].copy()
    query[0, 1, 5] = number
    assert_same_as_without(case.with_inputs(query=query))


@pytest.mark.parametrize("factor", [0.0, 1e-41, 1e-20, 1e12])
def test_keys_of_any_length(factor: float) -> None:
    case = screened_case(DECODE, shift=False)
    short = case.with_inputs(key_cache=case.inputs["key_cache"] * np.float32(factor))
    assert_same_as_without(with_screen(short, shift=False))
    assert_same_as_without(with_screen(short))


def test_a_key_that_the_screen_leaves_out_is_not_read() -> None:
    case = screened_case(DECODE, scale=2.0)
    cache = case.inputs["key_cache"].copy()
    keys = cache[case.inputs["block_table"][0, :125], 0].swapaxes(1, 2).reshape(-1, 64)  # [2000, 64]
    logits = 2.0 * keys @ case.inputs["query"][0].T
    logits = logits.reshape(125, -1).max(1)
    far = np.flatnonzero(logits < logits.max() - 20)[:10]  # blocks without a key that has a weight
    assert len(far)
    cache[case.inputs["block_table"][0, far]] = np.nan
    assert_same(run(case.with_inputs(collect_stats=np.array(False), key_cache=cache)), _with_cache(case, cache))


def test_many_keys_near_the_largest_logit_leave_out_the_others() -> None:
    """Logits are 0 and -1, alternating every 16 keys.

    A logit of -1 would have a weight beside one key with logit 0, but has none beside 2,000.
    """
    shape = Shape(sequences=((4096, 1),), kv_heads=1, group=2, head_dim=16, value_dim=16)
    case = screened_case(shape, shift=False, scale=1.0)
    table, below = case.inputs["block_table"][0], np.arange(4096) // 16 % 2 == 1
    cache = np.zeros_like(case.inputs["key_cache"])
    cache[table[np.arange(4096) // 16], 0, 0, np.arange(4096) % 16] = np.where(below, -1.0, 0.0)
    query = np.zeros_like(case.inputs["query"])
    query[..., 0] = 1
    same = {"query": query, "key": np.zeros_like(case.inputs["key"]), "collect_stats": np.array(False)}
    case = with_screen(case.with_inputs(key_cache=cache, **same), shift=False)
    assert_agrees(run(case), run_reference(case), case)
    spoilt = cache.copy()
    spoilt[table[np.flatnonzero(below)[::16] // 16]] = np.nan
    assert_same(run(case.with_inputs(key_cache=spoilt)), _with_cache(case, spoilt))


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 2.05, 3.0])
@pytest.mark.parametrize("keys_at_0", [4, 8, 16, 32, 64, 128, 224])
def test_a_key_just_above_the_limit_has_its_weight(alpha: float, keys_at_0: int) -> None:
    """Keys between the limit of the keys at 0 and the limit of half as many more keys are not left out."""
    total, each = 28_672, 16
    shape = Shape(sequences=((total - 1, 1),), kv_heads=1, group=1, head_dim=16, value_dim=16)
    case = screened_case(shape, shift=False, scale=1.0, alpha=alpha)
    limit, nearer = (-((1.5**power * keys_at_0) ** (1 - alpha)) / (alpha - 1) for power in (0, 1))
    logits = np.full(total, 10 * limit)
    logits[np.arange(100, total, 37)] = limit + 0.3 * (nearer - limit)
    # parts of 2,048 keys; the first keys of each part, one for every lane, get logit 0
    parts = max(1, keys_at_0 // each)
    logits[(np.arange(parts)[:, None] * 2048 + np.arange(min(each, keys_at_0))).ravel()] = 0
    table, index = case.inputs["block_table"][0], np.arange(total - 1)
    cache = np.zeros_like(case.inputs["key_cache"])
    cache[table[index // 16], 0, 0, index % 16] = logits[:-1]
    query, key = np.zeros_like(case.inputs["query"]), np.zeros_like(case.inputs["key"])
    query[..., 0], key[..., 0] = 1, logits[-1]
    case = with_screen(case.with_inputs(key_cache=cache, query=query, key=key), shift=False)
    found = assert_same_as_without(case)
    assert_agrees(found, run_reference(case), case, 1e-4 if alpha > 2 else 1e-5)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("scale", [0.002, 0.02, 0.1])
def test_rows_that_give_weight_to_many_keys(alpha: float, scale: float) -> None:
    shape = Shape(sequences=((20000, 1), (900, 2)), kv_heads=1, group=3, head_dim=64, value_dim=16)
    case = screened_case(shape, alpha=alpha, scale=scale)
    found = assert_same_as_without(case)
    # For alpha above 2, a weight is a root of the distance of its logit from the threshold, which enlarges errors.
    assert_agrees(found, run_reference(case), case, 1e-4 if alpha > 2 else 1e-5)
    assert (found.stats[0, :, 1] > {1.1: 10_000, 1.5: 30, 2.0: 4, 3.0: 1}[alpha]).all()


def _with_cache(case: Case, cache: np.ndarray) -> AttentionOutput:
    """Return the result over the case's own keys, with `cache` and the new key in place of the returned cache."""
    result = run(case.with_inputs(collect_stats=np.array(False)), screen=False)
    slot = int(case.inputs["slot_mapping"][0])
    held = cache.copy()
    held[slot // 16, :, :, slot % 16] = case.inputs["key"][0]
    return replace(result, key_cache=held)


def test_an_empty_screen_says_nothing() -> None:
    case = screened_case()
    empty = np.zeros_like(case.inputs["key_screen"])
    assert_same(run(case.with_inputs(key_screen=empty)), run(case, screen=False))
    none = np.zeros((0, *empty.shape[1:]), np.int8)
    assert_same(run(case.with_inputs(key_screen=none)), run(case, screen=False))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [16, 21])
def test_the_screen_is_written_with_the_keys(dtype: str, head_dim: int) -> None:
    shape = Shape(((0, 40), (30, 1), (17, 2)), head_dim=head_dim, drop_slots=True)
    case = with_screen(screened_case(shape), dtype)
    actual, expected = run(case, dtype).key_screen, run_reference(case).key_screen
    assert actual is not None
    assert expected is not None
    found, right = (unpack(screen, head_dim, 16) for screen in (actual, expected))
    np.testing.assert_array_equal(found.integers, right.integers)
    np.testing.assert_array_equal(found.scale, right.scale)
    np.testing.assert_allclose(found.distance, right.distance, rtol=1e-6)


@given(st.integers(0, 2**20), st.sampled_from((3, 16, 64)), st.sampled_from((1e-30, 1e-3, 1.0, 1e8)), st.booleans())
def test_the_interval_holds_the_logit_and_leaves_out_no_weight(seed: int, size: int, factor: float, far: bool) -> None:
    generator = np.random.default_rng(seed)
    keys = (factor * generator.standard_normal((200, size))).astype(np.float32)
    query = (generator.standard_normal(size) / factor).astype(np.float32)
    shift = (factor * generator.standard_normal(size) * (30 if far else 0.1)).astype(np.float32)
    keys += shift
    lower, upper = intervals(query, screen_of(keys, shift), shift)
    logits = keys.astype(np.float64) @ query.astype(np.float64)
    assert (lower <= logits).all()
    assert (logits <= upper).all()
    for alpha in (1.2, 1.5, 2.0):
        assert in_doubt(lower, upper, alpha)[entmax(logits, alpha) > 0].all()


def test_a_screen_is_packed_and_unpacked() -> None:
    keys = np.random.default_rng(0).standard_normal((3, 2, 16, 21)).astype(np.float32)
    screen = screen_of(keys, np.zeros(21))
    packed = pack(screen)
    assert packed.shape == (3, 2, screen_bytes(21, 16))
    for name, array in vars(unpack(packed, 21, 16)).items():
        np.testing.assert_array_equal(array, getattr(screen, name))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key_screen": np.zeros((9, 2, 7), np.int8)}, r"key_screen has shape .*; it must be \[blocks, kv_heads, "),
        (
            {"key_shift": np.zeros((2, 3), np.float32)},
            r"key_shift has shape \[2, 3\]; it must be \[kv_heads, head_dim\]",
        ),
        ({"key_shift": np.full((2, 64), np.nan, np.float32)}, r"key_shift\[0\]\[0\] is nan; it must be a number"),
    ],
)
def test_a_screen_that_does_not_fit_is_refused(changed: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(Exception, match=message):
        run(screened_case().with_inputs(**changed))


def test_no_screen_stays_none_where_keys_are_stored() -> None:
    cache = np.ones((2, 1, 8, 16), np.float32)
    store_screen(cache, np.zeros((0, 1, screen_bytes(8, 16)), np.int8), None, np.array([3]))
