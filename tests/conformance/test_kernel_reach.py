"""ALiBi heads under entmax stop where no key can have weight: exactly, and without reading what lies beyond."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper

from sharp.plugins.ops.schema import OUTPUTS
from tests.conformance.cases import Case, Shape, make_case, make_model, run_reference, session

SHAPE = Shape(sequences=((3000, 2), (700, 1), (0, 9)), kv_heads=2, group=2, head_dim=16, value_dim=16)


def nape_case(shape: Shape = SHAPE, **attributes: float) -> Case:
    """Heads 0 and 1 with slopes 1 and 1/2, heads 2 and 3 without positions; a third as long keys as usual."""
    case = make_case("entmax", shape, seed=2, **attributes)
    slopes = np.array([1.0, 0.5, 0.0, 0.0], np.float32)
    return case.with_inputs(alibi_slopes=slopes, collect_stats=np.array(False))


def norms(case: Case) -> np.ndarray:
    """The lengths of the longest keys [blocks, kv_heads]; 0 for what is not used."""
    return np.nan_to_num(np.linalg.norm(case.inputs["key_cache"], axis=2)).max(-1).astype(np.float32)


def run_with_norms(case: Case, key_norm: np.ndarray) -> list[np.ndarray]:
    """Output and updated norms of the kernel."""
    model = make_model(case)
    del model.functions[:]
    node = model.graph.node[0]
    node.input.extend(["", "", "key_norm"])
    node.output.extend(["", "", "key_norm_out"])
    model.graph.input.append(helper.make_tensor_value_info("key_norm", onnx.TensorProto.FLOAT, None))
    model.graph.output.append(helper.make_tensor_value_info("key_norm_out", onnx.TensorProto.FLOAT, None))
    loaded = session(model, kernel=True)
    return loaded.run(["output", "key_norm_out"], {**case.inputs, "key_norm": key_norm})


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("holes", [False, True])
def test_the_result_is_that_of_all_keys(alpha: float, holes: bool) -> None:
    case = nape_case(replace(SHAPE, holes=holes), alpha=alpha)
    output, _ = run_with_norms(case, norms(case))
    np.testing.assert_allclose(output, run_reference(case).output, atol=1e-5)


def test_keys_beyond_reach_are_not_read() -> None:
    case = nape_case()
    expected = run_reference(case).output
    cache = case.inputs["key_cache"].copy()
    cache[case.inputs["block_table"][0, :100], 0] = np.nan  # the first 1,600 of 3,000 keys of the ALiBi heads
    output, _ = run_with_norms(case.with_inputs(key_cache=cache), norms(case))
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_a_soft_cap_bounds_the_reach_without_norms() -> None:
    case = nape_case(softcap=5.0)
    expected = run_reference(case).output
    cache = case.inputs["key_cache"].copy()
    cache[case.inputs["block_table"][0, :100], 0] = np.nan
    spoilt = case.with_inputs(key_cache=cache)
    output = session(make_model(spoilt), kernel=True).run(["output"], spoilt.inputs)[0]
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_norms_grow_with_the_keys_that_are_stored() -> None:
    case = nape_case()
    before = norms(case) * 0.5
    _, after = run_with_norms(case, before)
    assert (after >= before).all()
    for token, slot in enumerate(case.inputs["slot_mapping"]):
        lengths = np.linalg.norm(case.inputs["key"][token], axis=1)
        assert (after[slot // 16] >= lengths).all()


def test_a_norm_that_is_nan_or_infinite_bounds_nothing() -> None:
    case = nape_case()
    expected = run_reference(case).output
    for number in (np.nan, np.inf):
        output, _ = run_with_norms(case, np.full_like(norms(case), number))
        np.testing.assert_allclose(output, expected, atol=1e-5)


def test_statistics_are_those_of_all_keys() -> None:
    case = nape_case().with_inputs(collect_stats=np.array(True))
    model = make_model(case)
    stats = session(model, kernel=True).run(list(OUTPUTS), case.inputs)[3]
    np.testing.assert_allclose(stats, run_reference(case).stats, rtol=1e-4, atol=1e-4)
