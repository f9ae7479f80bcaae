"""Weights that depend on the number of visible keys, interpreted: it is the row's number, also when keys are split."""

from typing import Any

import numpy as np
import pytest

from tests.full.triton.interpreted import CACHES, DATA, Run
from tests.full.triton.test_kernels import DTYPES, MIXED, assert_close, assert_int8_agrees, rounded
from tests.plugins.conformance import attention_cases
from tests.plugins.conformance.cases import Shape, assert_agrees, int8_case, make_case, run_reference
from tests.plugins.conformance.test_length import PAPERS


@pytest.mark.parametrize("normalizer", PAPERS)
def test_a_step_of_decode_chunk_and_prompt(run: Run, normalizer: str) -> None:
    for seed in (3, 4):
        case = make_case(normalizer, MIXED, seed=seed, alibi=seed == 3, sinks=True)
        assert_agrees(run(case), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("normalizer", PAPERS)
def test_a_long_context_is_split_and_merged(run: Run, normalizer: str) -> None:
    shape = Shape(sequences=((1100, 1), (700, 3), (600, 9)), kv_heads=1, group=2, head_dim=16, value_dim=16, holes=True)
    case = make_case(normalizer, shape, sinks=True)
    assert_agrees(run(case), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("changes", [{}, {"window": 150}])
@pytest.mark.parametrize("normalizer", PAPERS)
def test_the_keys_of_few_prompts_are_split(run: Run, normalizer: str, changes: dict[str, int]) -> None:
    lengths = ((200, 1), (470, 9), (0, 0), (31, 3), (90, 1))
    shape = Shape(sequences=lengths, kv_heads=1, group=5, head_dim=16, value_dim=24, holes=True)
    case = make_case(normalizer, shape, seed=2, sinks=True, **changes)
    assert_agrees(run(case, part_keys=64), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", PAPERS)
def test_16_bits(run: Run, normalizer: str, dtype: str) -> None:
    shape = Shape(sequences=((300, 1), (70, 9), (0, 40)), kv_heads=1, group=3, head_dim=16, value_dim=16)
    case = rounded(make_case(normalizer, shape, seed=5, sinks=True), (*DATA, *CACHES), dtype)
    case = case.with_inputs(collect_stats=np.array(False))
    assert_close(run(case, dtype, dtype), case, dtype)


@pytest.mark.parametrize("normalizer", PAPERS)
def test_int8_caches_and_rows_without_a_key(run: Run, normalizer: str) -> None:
    case = int8_case(make_case(normalizer, MIXED, seed=1, sinks=True))
    assert_int8_agrees(run(case, cache_dtype="int8"), run_reference(case), case)
    result = run(make_case(normalizer, MIXED, sinks=True, window=0))
    assert not result.output.any() and not result.stats.any()


@pytest.mark.parametrize("normalizer", PAPERS)
@pytest.mark.parametrize("form", attention_cases.FORMS)
def test_attention(run_attention: Run, form: Any, normalizer: str) -> None:
    shape = attention_cases.Shape(form=form, queries=17, new_keys=17, past=40, padded=form != "concatenating")
    case = attention_cases.make_case(normalizer, shape, sinks=True)
    attention_cases.assert_agrees(run_attention(case), attention_cases.run_reference(case), case, tolerance=2e-5)
