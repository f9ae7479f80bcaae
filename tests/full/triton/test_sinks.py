"""Sinks in the Triton kernels, interpreted: a head's sink joins its row once, however the keys are split."""

from typing import Any

import numpy as np
import pytest

from sharp.plugins.op.attributes import WITHOUT_SINK
from sharp.plugins.op.schema import NORMALIZERS
from tests.full.triton.interpreted import CACHES, DATA, Run
from tests.full.triton.test_kernels import DTYPES, MIXED, assert_close, assert_int8_agrees, rounded
from tests.plugins.conformance import attention_cases
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, int8_case, make_case, run_reference

COMPETING = [name for name in NORMALIZERS if name not in WITHOUT_SINK]
# No sink, usual sinks, a sink as large as the sum over many keys, and a sink so large that keys get no weight.
SINKS = (-np.inf, -1.0, 0.5, 3.0, 8.0, 1e4, -1e4, 1.0)


def with_sinks(case: Case, sinks: tuple[float, ...] = SINKS) -> Case:
    head_params = case.inputs["head_params"].copy()
    head_params[:, -1] = (sinks * len(head_params))[: len(head_params)]
    return case.with_inputs(head_params=head_params)


@pytest.mark.parametrize(
    ("normalizer", "alpha"), [*((normalizer, 1.5) for normalizer in COMPETING), ("entmax", 1.2), ("entmax", 2.0)]
)
def test_a_step_of_decode_chunk_and_prompt(run: Run, normalizer: str, alpha: float) -> None:
    for seed in (3, 4):
        case = with_sinks(
            make_case(normalizer, MIXED, seed=seed, alibi=seed == 3, sinks=True, alpha=alpha), SINKS[seed:]
        )
        assert_agrees(run(case), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("normalizer", COMPETING)
def test_a_long_context_is_split_and_merged(run: Run, normalizer: str) -> None:
    shape = Shape(sequences=((1100, 1), (700, 3), (600, 9)), kv_heads=1, group=2, head_dim=16, value_dim=16, holes=True)
    case = with_sinks(make_case(normalizer, shape, sinks=True), (8.0, 1.0))
    assert_agrees(run(case), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize(("changes", "collect"), [({}, True), ({"window": 150}, False)])
@pytest.mark.parametrize("normalizer", ["softmax", "ssa", "adaptive_softmax", "entmax"])
def test_the_keys_of_few_prompts_are_split(run: Run, normalizer: str, changes: dict[str, Any], collect: bool) -> None:
    lengths = ((200, 1), (470, 9), (0, 0), (31, 3), (90, 1))
    shape = Shape(sequences=lengths, kv_heads=1, group=5, head_dim=16, value_dim=24, holes=True)
    case = with_sinks(make_case(normalizer, shape, seed=2, sinks=True, **changes), SINKS[2:])
    case = case.with_inputs(collect_stats=np.array(collect))
    assert_agrees(run(case, part_keys=64), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", COMPETING)
def test_16_bits(run: Run, normalizer: str, dtype: str) -> None:
    shape = Shape(sequences=((300, 1), (70, 9), (0, 40)), kv_heads=1, group=3, head_dim=16, value_dim=16)
    case = with_sinks(
        rounded(make_case(normalizer, shape, seed=5, sinks=True), (*DATA, *CACHES), dtype), (-1.0, 2.0, 5.0)
    )
    case = case.with_inputs(collect_stats=np.array(False))
    assert_close(run(case, dtype, dtype), case, dtype)


@pytest.mark.parametrize("normalizer", COMPETING)
def test_int8_caches_and_rows_without_a_key(run: Run, normalizer: str) -> None:
    case = with_sinks(int8_case(make_case(normalizer, MIXED, seed=1, sinks=True)))
    assert_int8_agrees(run(case, cache_dtype="int8"), run_reference(case), case)
    nothing = with_sinks(make_case(normalizer, MIXED, sinks=True, window=0))
    result = run(nothing)
    assert not result.output.any() and not result.stats.any()


@pytest.mark.parametrize("normalizer", COMPETING)
@pytest.mark.parametrize("form", attention_cases.FORMS)
def test_attention(run_attention: Run, form: Any, normalizer: str) -> None:
    shape = attention_cases.Shape(form=form, queries=17, new_keys=17, past=40, padded=form != "concatenating")
    case = with_sinks(attention_cases.make_case(normalizer, shape, sinks=True), SINKS[1:])
    expected = attention_cases.run_reference(case)
    attention_cases.assert_agrees(run_attention(case), expected, case, tolerance=2e-5)


@pytest.mark.parametrize("normalizer", COMPETING)
def test_the_keys_of_few_queries_are_split(run_attention: Run, normalizer: str) -> None:
    # Rows are numbered by the head before the query: every row has the sink of its own head.
    shape = attention_cases.Shape(batch=2, queries=9, new_keys=301, kv_heads=2, group=2, head_dim=16, value_dim=16)
    case = with_sinks(attention_cases.make_case(normalizer, shape, sinks=True), SINKS[1:])
    expected = attention_cases.run_reference(case)
    attention_cases.assert_agrees(run_attention(case, part_keys=64), expected, case, tolerance=2e-5)
