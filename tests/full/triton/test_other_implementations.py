"""The Triton kernels beside implementations that are not ours: torch's SDPA and the `entmax` package."""

import entmax
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sharp.plugins.op.reference import AttentionOutput
from tests.full.triton.interpreted import Run
from tests.plugins.conformance.cases import Case, Shape, make_case

SHAPES = {
    "decode": Shape(sequences=((300, 1),), kv_heads=2, group=3, head_dim=16, value_dim=16),
    "prompt": Shape(sequences=((20, 50),), kv_heads=2, group=3, head_dim=16, value_dim=16),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_is_torch_sdpa(run: Run, shape: str) -> None:
    case = make_case("softmax", SHAPES[shape])
    result = run(case)
    query, key, value, visible = contiguous(case, result)
    expected = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=case.attributes["scale"], enable_gqa=True
    )
    np.testing.assert_allclose(result.output, expected.transpose(0, 1), atol=1e-6)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_entmax_is_the_entmax_package(run: Run, shape: str, alpha: float) -> None:
    case = make_case("entmax", SHAPES[shape], alpha=alpha)
    result = run(case)
    query, key, value, visible = contiguous(case, result)
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    logits = (query @ key.transpose(1, 2) * case.attributes["scale"]).masked_fill(~visible, -torch.inf)
    exact = {1.5: entmax.entmax15, 2.0: entmax.sparsemax}
    weights = exact[alpha](logits) if alpha in exact else entmax.entmax_bisect(logits, alpha, n_iter=100)
    np.testing.assert_allclose(result.output, (weights @ value).transpose(0, 1), atol=2e-6)


def contiguous(case: Case, result: AttentionOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, key and value [heads, length, dim] of the only sequence in float64, and who sees which key."""
    context, tokens = int(case.inputs["context_lens"][0]), case.inputs["query"].shape[0]
    positions = np.arange(context + tokens)
    blocks, offsets = case.inputs["block_table"][0][positions // 16], positions % 16
    key = torch.tensor(result.key_cache[blocks, :, :, offsets]).double().transpose(0, 1)
    value = torch.tensor(result.value_cache[blocks, :, offsets]).double().transpose(0, 1)
    query = torch.tensor(case.inputs["query"]).double().transpose(0, 1)
    visible = torch.tensor(positions[None, :] <= positions[context:, None])
    return query, key, value, visible
