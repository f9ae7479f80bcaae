"""`torch.ops.sharp.paged_attention` agrees with the reference, and its export loads in every runtime."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given

from sharp.core.errors import InputError
from sharp.plugins import library_path
from sharp.plugins.op.function_body import attach_function
from sharp.plugins.op.reference import AttentionOutput
from sharp.plugins.op.schema import DOMAIN, NORMALIZERS
from sharp.plugins.op.torch_paged_attention import onnx_translation_table, paged_attention
from tests.marks import full
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, cases, make_case, run_reference

INPUT_NAMES = [
    "hidden",
    "key_cache",
    "value_cache",
    "slot_mapping",
    "block_table",
    "query_start",
    "context_lens",
    "collect_stats",
]


def _run(case: Case) -> AttentionOutput:
    tensors = {name: torch.tensor(array) for name, array in case.inputs.items()}
    attributes = {**case.attributes, "causal": bool(case.attributes.get("causal", 1))}
    results = paged_attention(**tensors, normalizer=case.normalizer, **attributes)
    return AttentionOutput(*(result.numpy() for result in results))


@given(case=cases())
def test_random_calls(case: Case) -> None:
    assert_agrees(_run(case), run_reference(case), case)


def test_inputs_are_left_alone() -> None:
    case = make_case("softmax")
    before = case.inputs["key_cache"].copy()
    _run(case)
    np.testing.assert_array_equal(case.inputs["key_cache"], before)


@pytest.mark.parametrize(
    ("attributes", "message"), [({"normalizer": "hardmax"}, "one of"), ({"normalizer": "ssa"}, "head_params")]
)
def test_bad_attributes(attributes: dict[str, Any], message: str) -> None:
    tensors = {name: torch.tensor(array) for name, array in make_case("softmax").inputs.items()}
    with pytest.raises(InputError, match=message):
        paged_attention(**tensors, scale=1.0, **attributes)


class TwoLayers(torch.nn.Module):
    """Two calls that update the same cache one after the other, the second with a window."""

    def __init__(self, normalizer: str) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.head_params = torch.nn.Parameter(torch.tensor([[1.0, 1.5], [0.5, 2.0], [2.0, 1.0], [1.0, 1.0]]))

    def forward(
        self, hidden: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *state: torch.Tensor
    ) -> Any:
        query, key, value = hidden.split([32, 16, 16], dim=1)
        key, value = key.reshape(-1, 2, 8), value.reshape(-1, 2, 8)
        query = query.reshape(-1, 4, 8)
        parameters = self.head_params if self.normalizer == "ssa" else None
        collected = []
        for window in (-1, 3):
            query, key_cache, value_cache, stats = paged_attention(
                query, key, value, key_cache, value_cache, *state[:4], parameters, None, state[4],
                normalizer=self.normalizer, scale=0.35, window=window, temperature_coefficients=[0.5, 1.0],
            )  # fmt: skip
            collected.append(stats)
        return query, torch.stack(collected), key_cache, value_cache


def _arguments(sequences: tuple[tuple[int, int], ...], seed: int) -> tuple[torch.Tensor, ...]:
    case = make_case("softmax", Shape(sequences, kv_heads=2, group=2, head_dim=8, value_dim=8), seed)
    tokens = case.inputs["query"].shape[0]
    names = ["key_cache", "value_cache", "slot_mapping", "block_table", "query_start", "context_lens", "collect_stats"]
    torch.manual_seed(seed)
    return torch.randn(tokens, 64), *(torch.tensor(np.nan_to_num(case.inputs[name])) for name in names)


@pytest.mark.parametrize(
    "normalizer", [normalizer if normalizer in ("ssa", "entmax") else full(normalizer) for normalizer in NORMALIZERS]
)
def test_export_with_dynamic_shapes(normalizer: str) -> None:
    module = TwoLayers(normalizer).eval()
    dynamic = torch.export.Dim.DYNAMIC
    state = ({0: dynamic}, {0: dynamic, 1: dynamic}, {0: dynamic}, {0: dynamic}, {})
    program = torch.onnx.export(
        module,
        _arguments(((1, 2), (0, 3)), seed=0),
        dynamo=True,
        opset_version=23,
        custom_translation_table=onnx_translation_table(),
        dynamic_shapes=({0: dynamic}, {0: dynamic}, {0: dynamic}, state),
        input_names=INPUT_NAMES,
        verbose=False,
    )
    assert program is not None
    model = program.model_proto
    attach_function(model)
    onnx.checker.check_model(model, full_check=True)
    assert sum(node.domain == DOMAIN for node in model.graph.node) == 2
    arguments = _arguments(((20, 1), (3, 4), (40, 1)), seed=1)
    expected = module(*arguments)
    feeds = {name: argument.numpy() for name, argument in zip(INPUT_NAMES, arguments, strict=True)}
    for kernel in (True, False):
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if kernel:
            options.register_custom_ops_library(library_path("onnxruntime"))
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for actual, target in zip(session.run(None, feeds), expected, strict=True):
            np.testing.assert_allclose(actual, target.detach().numpy(), atol=1e-5, rtol=1e-5)
