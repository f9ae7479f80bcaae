"""Attention with sinks and its gradients: a sink is one more key, whose value is zero and whose logit is learned."""

import entmax
import pytest
import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models import attention_chunks
from sharp.models.attention import EagerAttention, LayerOptions
from sharp.models.config import SharpConfig
from sharp.models.normalized_attention import normalized_attention
from sharp.models.norms import NORMS
from sharp.plugins.op.torch_normalizers import NORMALIZERS as WEIGHTS
from sharp.plugins.op.torch_normalizers import NormalizerOptions, attention_weights
from tests.models.test_normalized_attention import BATCH, CASES, Q_HEADS, eager, tensors, visible_keys

COMPETING = ("softmax", "adaptive-temperature", "entmax", "sparsemax", "ssa", "softpick")
SINKS = torch.tensor([-2.0, 0.0, 1.0, 3.0, 40.0, -40.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(attention_chunks, "CHUNK", 3 * BATCH * Q_HEADS * 11)


def one_more_key(norm: str, logits: Tensor, visible: Tensor, head_params: Tensor, sinks: Tensor) -> Tensor:
    """Return attention weights by appending a sink key to every row that sees a key, without the code for sinks."""
    scheme = NORMS[norm]
    beta: Tensor | float = 1.0
    if scheme.normalizer == "adaptive_softmax":  # the temperature follows from the entropy of the keys alone
        options = NormalizerOptions(None, 1.5, tuple(SharpConfig.temperature_coefficients), 0.5)
        plain = WEIGHTS["softmax"](logits.masked_fill(~visible, 0.0), visible, options)
        entropy = -(plain * plain.clamp(min=1e-300).log()).sum(-1, keepdim=True)
        polynomial = sum(
            coefficient * entropy**power for power, coefficient in enumerate(reversed(options.temperature_coefficients))
        )
        beta = torch.where(entropy > 0.5, torch.as_tensor(polynomial).clamp(min=1.0), 1.0)
    column = sinks[:, None, None].expand(*logits.shape[:-1], 1)
    seen = torch.cat([visible, visible.any(-1, keepdim=True)], -1)
    all_logits = torch.cat([beta * logits, column], -1)
    if scheme.normalizer == "entmax":
        masked = all_logits.masked_fill(~seen & seen.any(-1, keepdim=True), -torch.inf)
        found = (entmax.sparsemax if scheme.alpha == 2.0 else entmax.entmax15)(masked, -1).masked_fill(~seen, 0.0)
    else:
        normalizer = "softmax" if scheme.normalizer == "adaptive_softmax" else scheme.normalizer
        found = attention_weights(normalizer, all_logits, seen, head_params=head_params)
    return found[..., :-1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("norm", COMPETING)
def test_output_and_gradients_are_those_of_one_more_key(norm: str, case: str) -> None:
    query, key, value, head_params = tensors(11, 11)
    sinks = SINKS.clone().requires_grad_()
    options = CASES[case]
    limits = {name: options[name] for name in ("causal", "window", "mask") if name in options}
    rest = {name: options[name] for name in ("softcap", "alibi_slopes") if name in options}
    given = head_params if norm == "ssa" else None
    output = normalized_attention(query, key, value, norm=norm, head_params=given, sinks=sinks, **options)
    expected = eager(
        lambda logits, visible: one_more_key(norm, logits, visible, head_params, sinks),
        *(query, key, value, visible_keys(11, 11, **limits)),
        **rest,
    )
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    learned = [query, key, value, sinks, *([] if given is None else [given])]
    found = torch.autograd.grad(output, learned, direction)
    for gradient, right in zip(found, torch.autograd.grad(expected, learned, direction), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("norm", COMPETING)
def test_sinks_of_minus_infinity_are_none(norm: str) -> None:
    query, key, value, head_params = tensors(11, 11)
    sinks = torch.full((Q_HEADS,), -torch.inf, dtype=torch.float64, requires_grad=True)
    given = head_params if norm == "ssa" else None
    results = []
    for own in (sinks, None):
        output = normalized_attention(query, key, value, norm=norm, head_params=given, sinks=own, causal=True)
        learned = [query, key, value, *([] if given is None else [given])]
        results.append([output, *torch.autograd.grad(output.square().sum(), learned, retain_graph=True)])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right)
    normalized_attention(query, key, value, norm=norm, head_params=given, sinks=sinks, causal=True).sum().backward()
    assert sinks.grad is not None and (sinks.grad == 0).all()


@pytest.mark.parametrize("norm", COMPETING)
def test_eager_attention_has_them_too(norm: str) -> None:
    query, key, value, head_params = (tensor.detach().float() for tensor in tensors(11, 11))
    config = SharpConfig(
        vocab_size=8, hidden_size=30, intermediate_size=8, layers=1, q_heads=Q_HEADS, kv_heads=2, head_dim=5, norm=norm,
        positions="none", trained_context=16, max_context=16,
    )  # fmt: skip
    sinks = SINKS.float()
    given = head_params if norm == "ssa" else None
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    found = EagerAttention(config)(0, *heads, given, None, LayerOptions(sinks=sinks))
    expected = normalized_attention(query, key, value, norm=norm, head_params=given, sinks=sinks, causal=True)
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_computed_is_refused() -> None:
    query, key, value, _ = tensors(11, 11)
    with pytest.raises(InputError, match=r"sinks has shape \[5\], but must be \[6\]"):
        normalized_attention(query, key, value, sinks=torch.zeros(5))
    with pytest.raises(InputError, match="its heads have sinks, which sigmoid has no place for"):
        normalized_attention(query, key, value, norm="sigmoid", sinks=SINKS)
