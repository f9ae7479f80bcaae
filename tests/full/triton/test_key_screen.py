"""Keys that the screen leaves out have no weight: the Triton kernels return the same bits with and without it.

`tests/plugins/conformance/test_key_screen.py` has the tests of the other kernels.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharp.plugins.op.key_screen import unpack
from sharp.plugins.op.reference import AttentionOutput
from tests.full.triton import interpreted
from tests.full.triton.interpreted import DATA, Run
from tests.full.triton.test_kernels import DTYPES, assert_close, rounded
from tests.full.triton.test_sinks import with_sinks
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, make_case, run_reference
from tests.plugins.conformance.screened import screened_case, with_screen

# Splits of 256 keys; sequences that decode one token and several, and a prompt, whose keys are read in full.
LONG = Shape(sequences=((600, 1), (270, 3), (0, 5), (50, 0)), kv_heads=1, group=3, head_dim=16, value_dim=16)
DECODE = Shape(sequences=((560, 1),), kv_heads=1, group=3, head_dim=16, value_dim=16)


def without_screen(case: Case) -> Case:
    inputs = {name: array for name, array in case.inputs.items() if name not in ("key_screen", "key_shift")}
    return replace(case, inputs=inputs)


def assert_same(actual: AttentionOutput, expected: AttentionOutput) -> None:
    for name in ("output", "key_cache", "value_cache", "stats"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)


def assert_same_as_without(run: Run, case: Case, *types: str) -> AttentionOutput:
    """Assert that the screen changes no bit, with and without statistics; return the result with statistics."""
    with_it: AttentionOutput = run(case, *types)
    assert_same(with_it, run(without_screen(case), *types))
    silent = case.with_inputs(collect_stats=np.array(False))
    assert_same(run(silent, *types), run(without_screen(silent), *types))
    return with_it


@pytest.mark.parametrize(
    "options",
    [{"alpha": 1.2}, {}, {"alpha": 2.0}, {"softcap": 8.0}, {"alibi": True}, {"window": 350}, {"causal": 0}],
    ids=str,
)
def test_long_contexts(run: Run, options: dict[str, float]) -> None:
    case = screened_case(LONG, **options)  # type: ignore[arg-type]
    assert_agrees(assert_same_as_without(run, case), run_reference(case), case, tolerance=5e-5)


@pytest.mark.parametrize("head_dim", [1, 21, 64, 80, 128])
def test_shapes_of_heads(run: Run, head_dim: int) -> None:
    shape = replace(LONG, sequences=((290, 1), (90, 2)), head_dim=head_dim, group=5 if head_dim > 64 else 1)
    assert_same_as_without(run, screened_case(shape))


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(("dtype", "cache"), [("float32", "float16"), *((kind, kind) for kind in DTYPES)])
def test_types_and_blocks(run: Run, dtype: str, cache: str, block_size: int) -> None:
    shape = replace(LONG, sequences=((290, 1), (90, 2)), block_size=block_size, holes=True, drop_slots=True)
    case = with_screen(rounded(screened_case(shape), DATA, cache), cache)
    result = assert_same_as_without(run, case, dtype, cache)
    assert_close(result, case, cache)


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 5)), min_size=1, max_size=3),
    group=st.sampled_from((1, 3, 17)),
    head_dim=st.sampled_from((5, 16, 64)),
    seed=st.integers(0, 2**20),
    integers=st.booleans(),
    holes=st.booleans(),
    window=st.sampled_from((-1, 0, 100)),
    scale=st.sampled_from((0.05, 0.3, 2.0, 256.0)),
    alpha=st.sampled_from((1.2, 1.5, 2.0)),
)
def test_random_calls(
    run: Run,
    lengths: list[tuple[int, int]],
    group: int,
    head_dim: int,
    seed: int,
    integers: bool,
    holes: bool,
    window: int,
    scale: float,
    alpha: float,
) -> None:
    # Scale and whole numbers decide between equal logits, keys that all have a weight, and one key alone.
    shape = Shape(tuple(lengths), 1, group, head_dim, 8, integers=integers, holes=holes)
    assert_same_as_without(
        run, screened_case(shape, seed, shift=bool(seed % 2), window=window, alpha=alpha, scale=scale)
    )


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e30, -3e38, 1e-42, 1e19])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_key_with_any_number_in_it(run: Run, number: float, softcap: float) -> None:
    case = screened_case(DECODE, softcap=softcap)
    cache = case.inputs["key_cache"].copy()
    cache[case.inputs["block_table"][0, 444 // 16], :, 3, 444 % 16] = number
    assert_same_as_without(run, with_screen(case.with_inputs(key_cache=cache)))


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e20, 3e38, 1e-42])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_query_with_any_number_in_it(run: Run, number: float) -> None:
    case = screened_case(replace(DECODE, sequences=((600, 2),)))
    query = case.inputs["query"].copy()
    query[0, 1, 5] = number
    assert_same_as_without(run, case.with_inputs(query=query))


@pytest.mark.parametrize("factor", [0.0, 1e-41, 1e-20, 1e12])
def test_keys_of_any_length(run: Run, factor: float) -> None:
    case = screened_case(replace(DECODE, sequences=((400, 1),)), shift=False)
    short = case.with_inputs(key_cache=case.inputs["key_cache"] * np.float32(factor))
    assert_same_as_without(run, with_screen(short, shift=False))
    assert_same_as_without(run, with_screen(short))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_of_any_size(run: Run, scale: float) -> None:
    case = screened_case(replace(DECODE, sequences=((400, 1),)), scale=scale)
    assert_same_as_without(run, case.with_inputs(query=case.inputs["query"] / np.float32(scale)))
    assert_same_as_without(run, case)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_sinks(run: Run, alpha: float) -> None:
    # Sinks between the logits of keys, below all of them, and so large that no key has a weight and all keys must be
    # counted.
    shape = replace(LONG, sequences=((500, 1), (90, 2), (0, 5)), group=8)
    case = with_screen(with_sinks(make_case("entmax", shape, sinks=True, alpha=alpha, scale=0.75)))
    assert_agrees(assert_same_as_without(run, case), run_reference(case), case, tolerance=5e-5)


def test_huge_logits(run: Run) -> None:
    case = screened_case(replace(LONG, integers=True), scale=2.0**22)
    assert_agrees(assert_same_as_without(run, case), run_reference(case), case)


def test_rows_without_a_key(run: Run) -> None:
    case = screened_case(replace(LONG, sequences=((300, 1), (40, 3))))
    hidden = case.with_inputs(block_table=np.full_like(case.inputs["block_table"], -1))
    assert not assert_same_as_without(run, hidden).output.any()
    assert not assert_same_as_without(run, screened_case(replace(LONG, sequences=((300, 1),)), window=0)).stats.any()


def test_a_block_that_the_cache_does_not_have_is_a_hole(run: Run) -> None:
    case = screened_case(replace(DECODE, sequences=((300, 1),)))
    table = case.inputs["block_table"].copy()
    table[0, 2], table[0, 5] = len(case.inputs["key_cache"]), 2**31 - 1
    assert_same_as_without(run, case.with_inputs(block_table=table))


def test_a_key_that_the_screen_leaves_out_is_not_read(run: Run) -> None:
    case = screened_case(DECODE, scale=2.0).with_inputs(collect_stats=np.array(False))
    cache = case.inputs["key_cache"].copy()
    keys = cache[case.inputs["block_table"][0, :35], 0].swapaxes(1, 2).reshape(-1, 16)  # [560, 16]
    logits = (2.0 * keys @ case.inputs["query"][0].T).reshape(35, -1).max(1)
    far = np.flatnonzero(logits < logits.max() - 12)[:10]  # blocks without a key that has a weight
    assert len(far)
    cache[case.inputs["block_table"][0, far]] = np.nan
    np.testing.assert_array_equal(run(case.with_inputs(key_cache=cache)).output, run(without_screen(case)).output)


def test_an_empty_screen_says_nothing(run: Run) -> None:
    case = screened_case(replace(DECODE, sequences=((300, 1),)))
    empty = np.zeros_like(case.inputs["key_screen"])
    expected = run(without_screen(case))
    assert_same(run(case.with_inputs(key_screen=empty)), expected)
    assert_same(run(case.with_inputs(key_screen=np.zeros((0, *empty.shape[1:]), np.int8))), expected)


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
@pytest.mark.parametrize("head_dim", [16, 21])
def test_the_screen_is_written_with_the_keys(run: Run, dtype: str, head_dim: int) -> None:
    shape = Shape(((0, 40), (30, 1), (17, 2)), head_dim=head_dim, drop_slots=True)
    case = with_screen(screened_case(shape), dtype)
    key = case.inputs["key"].copy()
    key[0, 0, 0], key[1, 1, 1], key[2], key[3, 0] = np.nan, np.inf, 0, key[3, 0] * 1e-38
    case = case.with_inputs(key=key)
    with np.errstate(invalid="ignore"):
        expected = run_reference(case).key_screen
    assert expected is not None
    found, right = (unpack(screen, head_dim, 16) for screen in (run(case, dtype, dtype).key_screen, expected))
    np.testing.assert_array_equal(found.integers, right.integers)
    np.testing.assert_array_equal(found.scale, right.scale)
    np.testing.assert_allclose(found.distance, right.distance, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neighbours", [True, False])
def test_few_keys_are_read(interpreter: ProcessPoolExecutor, dtype: str, neighbours: bool) -> None:
    # 1 % of the keys stand out. A kernel reads a key with its strip, the 16 keys that lie side by side in memory.
    context, few = 1024, 10
    shape = Shape(((context, 1),), kv_heads=1, group=4, head_dim=64, value_dim=64)
    case = make_case("entmax", shape, scale=1.0).with_inputs(collect_stats=np.array(False))
    query = np.ones_like(case.inputs["query"]) + 0.01 * case.inputs["query"]
    generator = np.random.default_rng(2)
    keys = generator.normal(0, 0.02, (context, 64)).astype(np.float32)
    first = 512
    chosen = np.arange(first, first + few) if neighbours else generator.choice(context, few, replace=False)
    keys[chosen] += 0.1
    cache = case.inputs["key_cache"].copy()
    for position, vector in enumerate(keys):
        cache[case.inputs["block_table"][0, position // 16], 0, :, position % 16] = vector
    case = with_screen(rounded(case.with_inputs(query=query, key_cache=cache), DATA, dtype), dtype, shift=False)
    found = interpreter.submit(interpreted.screen_reads, case, dtype).result()
    strips = len(np.unique(chosen // 16)) + 1  # and the strip of the new key, at most
    assert few / context <= found[0] <= strips * 16 / context
    assert 1 <= found[1] < 1.05  # the screen is read once, and a little is loaded ahead behind a split
    assert found[2] <= strips * 16 / context
    case = replace(case, inputs=case.inputs | {"collect_stats": np.array(True)})
    # with statistics also the keys that may have the smallest logit
    assert interpreter.submit(interpreted.screen_reads, case, dtype).result()[0] < 0.5
