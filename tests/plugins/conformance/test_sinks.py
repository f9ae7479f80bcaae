"""Attention sinks, one more logit of every head, in every implementation; `cases` has random calls with them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from entmax import entmax15, entmax_bisect, sparsemax
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from sharp.core.errors import InputError
from sharp.plugins.op.attributes import WITHOUT_SINK
from sharp.plugins.op.normalizers import Normalizer, normalize
from sharp.plugins.op.schema import NORMALIZERS
from sharp.plugins.op.torch_attention import attention
from sharp.plugins.op.torch_paged_attention import paged_attention
from tests.plugins.conformance import attention_cases
from tests.plugins.conformance.cases import (
    Case,
    Shape,
    assert_agrees,
    int8_case,
    make_case,
    make_model,
    run,
    run_reference,
    session,
)
from tests.plugins.conformance.screened import run as run_screened
from tests.plugins.conformance.screened import with_screen
from tests.plugins.conformance.test_kernel_types import int8_model

COMPETING = [name for name in NORMALIZERS if name not in WITHOUT_SINK]
ROWS = np.random.default_rng(0).normal(0, 2, (20, 30))
SINKS = (-3.0, 0.0, 4.0, 20.0)


def run_torch(case: attention_cases.Case) -> np.ndarray:
    tensors = {name: torch.tensor(array) for name, array in case.inputs.items()}
    return attention(**tensors, normalizer=case.normalizer, **{**case.attributes, "causal": True})[0].numpy()


@pytest.mark.parametrize("implementation", ["kernel", "body", "torch", "reference"])
def test_softmax_is_gpt_oss_of_transformers(implementation: str) -> None:
    case = attention_cases.make_case("softmax", attention_cases.Shape(queries=9, new_keys=9), sinks=True)
    query, key, value, sinks = (torch.tensor(case.inputs[name]) for name in ("query", "key", "value", "head_params"))
    module = SimpleNamespace(sinks=sinks.flatten(), num_key_value_groups=3, training=False)
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    expected, _ = eager_attention_forward(module, query, key, value, mask, case.attributes["scale"])
    actual = {
        "kernel": lambda: attention_cases.run(case, kernel=True).output,
        "body": lambda: attention_cases.run(case, kernel=False).output,
        "torch": lambda: run_torch(case),
        "reference": lambda: attention_cases.run_reference(case).output,
    }[implementation]()
    np.testing.assert_allclose(actual, expected.transpose(1, 2).numpy(), atol=1e-5)


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_entmax_is_the_package_with_one_more_logit(alpha: float, sink: float) -> None:
    for row in ROWS:
        logits = torch.tensor([*row, sink])
        if alpha == 1.5:
            expected = entmax15(logits)
        elif alpha == 2.0:
            expected = sparsemax(logits)
        else:
            expected = entmax_bisect(logits, alpha=alpha, n_iter=60)
        weights, statistics = normalize(row, Normalizer("entmax", alpha), (sink,))
        np.testing.assert_allclose(weights, expected[:-1].numpy(), atol=1e-9)
        assert statistics.support == (expected[:-1] > 0).sum()


@pytest.mark.parametrize(("kernel", "alpha"), [(True, 1.3), (True, 1.5), (True, 2.0), (False, 1.5)])
def test_entmax_kernels_are_the_package_with_one_more_logit(kernel: bool, alpha: float) -> None:
    keys = 100
    shape = Shape(sequences=((0, keys),), kv_heads=1, group=len(SINKS), head_dim=1, value_dim=keys)
    case = make_case("entmax", shape, alpha=alpha, scale=1.0)
    logits = np.random.default_rng(0).normal(0, 3, keys).astype(np.float32)
    case = case.with_inputs(
        query=np.ones((keys, len(SINKS), 1), np.float32),
        key=logits[:, None, None],
        value=np.eye(keys, dtype=np.float32)[:, None, :],
        head_params=np.array(SINKS, np.float32)[:, None],
    )
    weights = run(case, kernel=kernel).output[-1]  # the last query sees every key
    for sink, actual in zip(SINKS, weights, strict=True):
        row = torch.tensor([*logits.astype(np.float64), sink])
        expected = entmax_bisect(row, alpha=alpha, n_iter=60)[:-1].numpy()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("normalizer", COMPETING)
def test_weights_are_those_of_a_key_whose_value_is_zero(normalizer: str) -> None:
    parameters = (0.7, 1.4) if normalizer == "ssa" else ()
    for row in ROWS:
        weights, statistics = normalize(row, Normalizer(normalizer), (*parameters, 1.5))
        if normalizer == "adaptive_softmax":  # the temperature and the statistics are those of the keys alone
            _, statistics_of_keys = normalize(row, Normalizer(normalizer))
            assert replace(statistics, sink_mass=0.0) == statistics_of_keys
            expected, _ = normalize(np.append(statistics.inverse_temperature * row, 1.5), Normalizer("softmax"))
        else:
            expected, _ = normalize(np.append(row, 1.5), Normalizer(normalizer), parameters)
        np.testing.assert_allclose(weights, expected[:-1], atol=1e-12)


@pytest.mark.parametrize("normalizer", ["softmax", "ssa", "adaptive_softmax"])
def test_statistics_are_those_of_the_keys_alone(normalizer: str) -> None:
    parameters = (0.7, 1.4) if normalizer == "ssa" else ()
    for sink in (-np.inf, *SINKS, 1e4):
        _, statistics = normalize(ROWS[0], Normalizer(normalizer), (*parameters, sink))
        assert replace(statistics, sink_mass=0.0) == normalize(ROWS[0], Normalizer(normalizer), parameters)[1]


@pytest.mark.parametrize("normalizer", COMPETING)
def test_the_mass_of_the_sink_is_what_the_keys_lack(normalizer: str) -> None:
    parameters = (0.7, 1.4) if normalizer == "ssa" else ()
    for row in ROWS:
        for sink in (-np.inf, *SINKS, -1e4):
            weights, statistics = normalize(row, Normalizer(normalizer), (*parameters, sink))
            if normalizer == "softpick":  # under softpick, keys with a logit below 0 take a part of the sum, too
                sizes = np.abs(np.expm1([*row, 0.0 if sink == -np.inf else sink]))
                assert statistics.sink_mass == pytest.approx(sizes[-1] / sizes.sum(), abs=1e-12)
            else:
                assert statistics.sink_mass == pytest.approx(1 - weights.sum(), abs=1e-12)
        assert normalize(row, Normalizer(normalizer), parameters)[1].sink_mass == 0


def test_a_sink_of_0_takes_nothing_under_softpick() -> None:
    weights, statistics = normalize(np.array([-1.0, -2.0]), Normalizer("softpick"), (0.0,))
    assert not weights.any() and statistics.sink_mass == 0
    _, statistics = normalize(np.zeros(2), Normalizer("softpick"), (-1.0,))
    assert statistics.sink_mass == 1


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("normalizer", COMPETING)
def test_without_the_attribute_there_are_four_columns(normalizer: str, kernel: bool) -> None:
    case = make_case(normalizer, sinks=True)
    model = make_model(replace(case, attributes={"scale": case.attributes["scale"]}))
    # In model folders of earlier versions, neither the node nor the function has the attribute.
    for attributes in (model.graph.node[0].attribute, model.functions[0].attribute_proto):
        kept = [attribute for attribute in attributes if attribute.name != "stats_columns"]
        del attributes[:]
        attributes.extend(kept)
    (stats,) = session(model, kernel).run(["stats"], case.inputs)
    np.testing.assert_array_equal(stats, run(case, kernel=kernel).stats[..., :4])


@pytest.mark.parametrize("kernel", [True, False])
def test_without_collect_stats_the_mass_is_0_too(kernel: bool) -> None:
    case = make_case("softmax", sinks=True).with_inputs(collect_stats=np.array(False))
    stats = run(case, kernel=kernel).stats
    assert stats.shape[-1] == 5 and not stats.any()


@pytest.mark.parametrize("form", attention_cases.FORMS)
@pytest.mark.parametrize("normalizer", COMPETING)
def test_the_mass_in_both_ops_of_torch(normalizer: str, form: Any) -> None:
    paged = make_case(normalizer, sinks=True)
    tensors = {name: torch.tensor(array) for name, array in paged.inputs.items()}
    stats = paged_attention(**tensors, normalizer=normalizer, **paged.attributes)[3]
    np.testing.assert_allclose(stats[..., 4], run_reference(paged).stats[..., 4], atol=1e-5)
    shape = attention_cases.Shape(form=form, queries=4, new_keys=4, past=9)
    case = attention_cases.make_case(normalizer, shape, sinks=True)
    tensors = {name: torch.tensor(array) for name, array in case.inputs.items()}
    stats = attention(**tensors, normalizer=normalizer, **case.attributes)[3]
    np.testing.assert_allclose(stats[..., 4], attention_cases.run_reference(case).stats[..., 4], atol=1e-5)


@pytest.mark.parametrize("columns", [3, 6])
def test_other_columns_of_statistics_are_refused(columns: int) -> None:
    case = make_case("softmax", sinks=True, stats_columns=columns)
    message = f"stats_columns is {columns}; it must be 4, or 5 with the sink's mass"
    tensors: dict[str, Any] = {name: torch.tensor(array) for name, array in case.inputs.items()}
    with pytest.raises(InputError, match=message):
        paged_attention(**tensors, normalizer="softmax", **case.attributes)
    with pytest.raises(InputError, match=message):
        make_model(case)
    model = make_model(replace(case, attributes={"scale": 1.0}))
    del model.functions[:]
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "stats_columns":
            attribute.i = columns
    with pytest.raises(RuntimeException, match=f"attribute {message}"):
        session(model, kernel=True)


@pytest.mark.parametrize("normalizer", COMPETING)
def test_a_sink_of_minus_infinity_changes_no_bit(normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((600, 1), (0, 7))), alibi=True)
    own = case.inputs.get("head_params", np.zeros((6, 0), np.float32))
    none = case.with_inputs(head_params=np.append(own, np.full((6, 1), -np.inf, np.float32), 1))
    expected, actual = run(case, kernel=True), run(none, kernel=True)
    np.testing.assert_array_equal(actual.output, expected.output)
    np.testing.assert_array_equal(actual.stats, expected.stats)
    np.testing.assert_allclose(run(none, kernel=False).output, run(case, kernel=False).output, atol=1e-6)


@pytest.mark.parametrize("normalizer", COMPETING)
def test_a_long_context_counts_the_sink_once(normalizer: str) -> None:
    shape = Shape(sequences=((5000, 1), (2500, 2)), kv_heads=1, group=4, head_dim=16, value_dim=16, holes=True)
    case = make_case(normalizer, shape, sinks=True)
    head_params = case.inputs["head_params"].copy()
    head_params[:, -1] = (8.0, 9.0, 1.0, -np.inf)  # sinks as large as the logarithm of a sum over thousands of keys
    case = case.with_inputs(head_params=head_params)
    result = run(case, kernel=True)
    assert_agrees(result, run_reference(case), case, tolerance=2e-5)
    np.testing.assert_array_equal(result.output, run(case, kernel=True, threads=1).output)


@pytest.mark.parametrize("normalizer", COMPETING)
def test_rows_without_a_key_are_zeros(normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((40, 3),)), sinks=True, window=0)
    for kernel in (True, False):
        result = run(case, kernel=kernel)
        assert not result.output.any() and not result.stats.any()


@pytest.mark.parametrize("normalizer", COMPETING)
def test_a_sink_far_above_all_logits_takes_everything(normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((40, 3),)), sinks=True)
    head_params = case.inputs["head_params"].copy()
    head_params[:, -1] = 3e38
    for kernel in (True, False):
        result = run(case.with_inputs(head_params=head_params), kernel=kernel)
        assert np.isfinite(result.stats).all()
        np.testing.assert_allclose(result.stats[..., 4], 1)
        if normalizer != "ssa":  # under ssa, weights fall off only as a power
            assert not result.output.any()


@pytest.mark.parametrize("normalizer", COMPETING)
def test_int8_caches(normalizer: str) -> None:
    case = int8_case(make_case(normalizer, Shape(sequences=((300, 1), (0, 9))), sinks=True, alibi=True))
    output, stats = session(int8_model(case), kernel=True).run(["output", "stats"], case.inputs)
    expected = run_reference(case)
    np.testing.assert_allclose(output, expected.output, atol=2e-5)
    np.testing.assert_allclose(stats[..., [0, 4]], expected.stats[..., [0, 4]], atol=1e-4)


def test_a_screened_cache() -> None:
    case = make_case("entmax", Shape(sequences=((900, 1),), head_dim=16), sinks=True, scale=0.75)
    with_it, without = (run_screened(with_screen(case), screen=screen) for screen in (True, False))
    np.testing.assert_array_equal(with_it.output, without.output)
    assert_agrees(with_it, run_reference(with_screen(case)), case)


BAD = [
    ("softmax", (6, 2), r"head_params has 2 columns; softmax takes 1 \(the sink\)"),
    ("entmax", (5, 1), r"head_params has shape \[5, 1\]; it must be \[q_heads, parameters\] = \[6, 1\]"),
    ("ssa", (6, 4), r"head_params has 4 columns; ssa takes 2 \(b, n\) or 3 \(the sink behind them\)"),
    ("sigmoid", (6, 1), r"head_params has 1 columns; sigmoid takes 2 \(bias, power\) and no sink"),
]


@pytest.mark.parametrize(("normalizer", "shape", "message"), BAD)
def test_the_kernel_refuses_other_columns(normalizer: str, shape: tuple[int, int], message: str) -> None:
    case = make_case(normalizer)
    model = make_model(case.with_inputs(head_params=np.ones((6, 3), np.float32)) if normalizer != "sigmoid" else case)
    del model.functions[:]
    if normalizer == "sigmoid":
        model.graph.node[0].input[9] = "head_params"
        model.graph.input.extend(make_model(make_case("ssa")).graph.input[9:10])
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(InvalidArgument, match=message):
        session(model, kernel=True).run(None, {**case.inputs, "head_params": np.ones(shape, np.float32)})


@pytest.mark.parametrize("sink", [np.nan, np.inf])
def test_the_kernel_refuses_a_sink_that_is_no_number(sink: float) -> None:
    case = make_case("softmax").with_inputs(head_params=np.full((6, 1), sink, np.float32))
    with pytest.raises(InvalidArgument, match=r"head_params\[0\] has the sink .*; it must be a number, or -infinity"):
        run(case, kernel=True)


def test_the_body_refuses_a_second_column() -> None:
    case = make_case("softmax").with_inputs(head_params=np.ones((6, 2), np.float32))
    with pytest.raises(Fail, match="6 by 12"):
        run(case, kernel=False)


@pytest.mark.parametrize("columns", [2, 3])
def test_normalizers_without_competition_refuse_sinks(columns: int) -> None:
    case: Case = make_case("relu")
    tensors: dict[str, Any] = {name: torch.tensor(array) for name, array in case.inputs.items()}
    message = rf"head_params has {columns} columns; relu takes 1 \(power\) and no sink: give it these, or leave it out"
    with pytest.raises(InputError, match=message):
        paged_attention(**tensors, head_params=torch.ones(6, columns), normalizer="relu", **case.attributes)
    with pytest.raises(InputError, match=message):
        normalize(ROWS[0], Normalizer("relu"), (1.0,) * columns)
    given = case.with_inputs(head_params=np.ones((6, columns), np.float32))
    for kernel, error, text in ((True, InvalidArgument, message), (False, Fail, "broadcast")):
        with pytest.raises(error, match=text):
            run(given, kernel=kernel)
