"""Under entmax, heads with ALiBi stop at the distance where no key can have weight, and do not read beyond."""

from dataclasses import replace

import numpy as np
import pytest

from sharp.plugins.op.schema import OUTPUTS
from tests.plugins.conformance.cases import Case, Shape, make_case, make_model, run_reference, session

SHAPE = Shape(sequences=((3000, 2), (700, 1), (0, 9)), kv_heads=2, group=2, head_dim=16, value_dim=16)


def nape_case(shape: Shape = SHAPE, **attributes: float) -> Case:
    """Return a case whose heads 0 and 1 have slopes 1 and 1/2, and whose heads 2 and 3 have no positions."""
    case = make_case("entmax", shape, seed=2, **attributes)
    slopes = np.array([1.0, 0.5, 0.0, 0.0], np.float32)
    return case.with_inputs(alibi_slopes=slopes, collect_stats=np.array(False))


def longest_key(case: Case) -> float:
    """Return the length of the longest key among the caches and the new keys."""
    cached = np.nan_to_num(np.linalg.norm(case.inputs["key_cache"], axis=2)).max()
    return float(max(cached, np.linalg.norm(case.inputs["key"], axis=2).max()))


def with_spoilt_far_keys(case: Case) -> Case:
    """Return the case with NaN in the first 1,600 of the 3,000 keys of the ALiBi heads."""
    cache = case.inputs["key_cache"].copy()
    cache[case.inputs["block_table"][0, :100], 0] = np.nan
    return case.with_inputs(key_cache=cache)


def run_kernel(case: Case, **attributes: float) -> np.ndarray:
    case = replace(case, attributes={**case.attributes, **attributes})
    output: np.ndarray = session(make_model(case), kernel=True).run(["output"], case.inputs)[0]
    return output


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("holes", [False, True])
def test_the_result_is_that_of_all_keys(alpha: float, holes: bool) -> None:
    case = nape_case(replace(SHAPE, holes=holes), alpha=alpha)
    output = run_kernel(case, key_bound=longest_key(case))
    np.testing.assert_allclose(output, run_reference(case).output, atol=1e-5)


def test_keys_beyond_reach_are_not_read() -> None:
    case = nape_case()
    spoilt = with_spoilt_far_keys(case)
    output = run_kernel(spoilt, key_bound=longest_key(case))
    np.testing.assert_allclose(output, run_reference(case).output, atol=1e-5)
    assert np.isnan(run_kernel(spoilt)).any()  # without the bound on keys, the kernel reads the far keys


def test_a_soft_cap_bounds_the_reach_too() -> None:
    case = nape_case(softcap=5.0)
    output = run_kernel(with_spoilt_far_keys(case))
    np.testing.assert_allclose(output, run_reference(case).output, atol=1e-5)


def test_an_infinite_bound_bounds_nothing() -> None:
    case = nape_case()
    np.testing.assert_allclose(run_kernel(case, key_bound=np.inf), run_reference(case).output, atol=1e-5)


@pytest.mark.parametrize("bound", [-1.0, np.nan])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(Exception, match=r"key_bound is .*; it must be 0 "):
        run_kernel(nape_case(), key_bound=bound)


def test_statistics_are_those_of_all_keys() -> None:
    case = nape_case().with_inputs(collect_stats=np.array(True))
    bounded = replace(case, attributes={**case.attributes, "key_bound": longest_key(case)})
    stats = session(make_model(bounded), kernel=True).run(list(OUTPUTS), case.inputs)[3]
    np.testing.assert_allclose(stats, run_reference(case).stats, rtol=1e-4, atol=1e-4)
