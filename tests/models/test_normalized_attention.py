"""Streamed attention and its gradients agree with eager attention in float64 and with the `entmax` package."""

from collections.abc import Callable

import entmax
import pytest
import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models import attention_chunks
from sharp.models.normalized_attention import normalized_attention
from sharp.models.norms import NORMS
from sharp.plugins.op.torch_normalizers import attention_weights

BATCH, Q_HEADS, KV_HEADS, DIM = 2, 6, 2, 5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Make attention run in chunks of a few rows, the last of another size than the others."""
    monkeypatch.setattr(attention_chunks, "CHUNK", 3 * BATCH * Q_HEADS * 11)


def tensors(queries: int, keys: int, *, dtype: torch.dtype = torch.float64, size: float = 2.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)

    def one(heads: int, tokens: int) -> Tensor:
        made = torch.randn(BATCH, heads, tokens, DIM, generator=generator, dtype=torch.float64) * size
        return made.to(dtype).requires_grad_()

    b_and_n = torch.rand(Q_HEADS, 2, generator=generator, dtype=torch.float64) + torch.tensor([0.3, 1.0])
    return [one(Q_HEADS, queries), one(KV_HEADS, keys), one(KV_HEADS, keys), b_and_n.to(dtype).requires_grad_()]


@pytest.mark.parametrize("norm", ["softmax", "entmax", "softpick"])
def test_autocast_rounds_no_logit(norm: str) -> None:
    """Logits stay in float32 under autocast to bfloat16; products of 8 bits would move logits of 20 by 0.1."""
    query, key, value = (tensor.detach().float().requires_grad_() for tensor in tensors(7, 11)[:3])
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = normalized_attention(query, key, value, norm=norm, causal=True)
            found.append([output, *torch.autograd.grad(output.square().sum(), (query, key, value))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def visible_keys(queries: int, keys: int, causal: bool = False, window: int = -1, mask: Tensor | None = None) -> Tensor:
    distance = torch.arange(keys)[None] - torch.arange(keys - queries, keys)[:, None]
    visible = distance <= 0 if causal or window >= 0 else torch.ones_like(distance, dtype=torch.bool)
    if window >= 0:
        visible = visible & (distance > -window)
    return visible if mask is None else visible & mask


def eager(
    weights_of: Callable[[Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    key, value = (tensor.repeat_interleave(Q_HEADS // KV_HEADS, 1) for tensor in (key, value))
    logits = query @ key.mT * DIM**-0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if alibi_slopes is not None:
        queries, keys = logits.shape[-2:]
        distance = torch.arange(keys)[None] - torch.arange(keys - queries, keys)[:, None]
        logits = logits - alibi_slopes[:, None, None] * distance.abs()
    return weights_of(logits, visible.expand_as(logits)) @ value


def check(norm: str, weights_of: Callable[[Tensor, Tensor], Tensor], inputs: list[Tensor], **options: object) -> None:
    """Assert that the output and all gradients equal those of eager attention."""
    query, key, value, head_params = inputs
    alpha = options.pop("alpha", None)
    limits = {name: options[name] for name in ("causal", "window", "mask") if name in options}
    rest = {name: options[name] for name in ("softcap", "alibi_slopes") if name in options}
    visible = visible_keys(query.shape[2], key.shape[2], **limits)
    given = head_params if NORMS[norm].head_parameters else None
    output = normalized_attention(query, key, value, norm=norm, alpha=alpha, head_params=given, **options)
    expected = eager(weights_of, query, key, value, visible, **rest)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    learned = inputs if given is not None else inputs[:3]
    found = torch.autograd.grad(output, learned, direction)
    for gradient, right in zip(found, torch.autograd.grad(expected, learned, direction), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-7, atol=1e-8)


def definition(norm: str, head_params: Tensor, alpha: float | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    scheme = NORMS[norm]

    def weights_of(logits: Tensor, visible: Tensor) -> Tensor:
        given = head_params if scheme.head_parameters else None
        return attention_weights(scheme.normalizer, logits, visible, head_params=given, alpha=alpha or scheme.alpha)

    return weights_of


CASES = {
    "causal": {"causal": True},
    "both sides": {},
    "window": {"window": 4},
    "window of one": {"causal": True, "window": 1},
    "empty window": {"window": 0},
    "softcap": {"causal": True, "softcap": 1.5},
    "alibi": {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.6, Q_HEADS, dtype=torch.float64)},
    "padding": {"causal": True, "mask": (torch.arange(11) >= 4)[None, None, None].repeat(BATCH, 1, 1, 1)},
    "a mask of its own": {"mask": torch.rand(BATCH, Q_HEADS, 11, 11, generator=torch.Generator().manual_seed(0)) < 0.3},
}
NORM_NAMES = ("softmax", "adaptive-temperature", "entmax", "sparsemax", "ssa", "sigmoid", "relu", "relu2", "softpick")

# Formulas of the papers: the bias -ln n of Ramapuram et al. (2024), and the division by length of Wortsman et al.
# (2023).
WITH_LENGTH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid-n": lambda logits, count: 1 / (1 + torch.exp(-logits + torch.log(count))),
    "relu-n": lambda logits, count: torch.relu(logits) / count,
    "relu2-n": lambda logits, count: torch.relu(logits) ** 2 / count,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("norm", WITH_LENGTH)
def test_norms_of_the_length_are_those_of_their_papers(norm: str, case: str) -> None:
    def weights_of(logits: Tensor, visible: Tensor) -> Tensor:
        count = visible.sum(-1, keepdim=True).clamp(min=1).double()
        return torch.where(visible, WITH_LENGTH[norm](logits, count), 0.0)

    check(norm, weights_of, tensors(11, 11), **CASES[case])


@pytest.mark.parametrize("norm", ["sigmoid", "relu", "relu2"])
def test_bias_and_power_may_be_learned(norm: str) -> None:
    query, key, value, head_params = tensors(5, 5, size=1.0)
    own = head_params[:, : 2 if norm == "sigmoid" else 1].detach().clone().requires_grad_()

    def attend(query: Tensor, key: Tensor, value: Tensor, own: Tensor) -> Tensor:
        return normalized_attention(query, key, value, norm=norm, head_params=own, causal=True)

    torch.autograd.gradcheck(attend, (query, key, value, own), atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("norm", NORM_NAMES)
def test_output_and_gradients_are_those_of_eager_attention(norm: str, case: str) -> None:
    inputs = tensors(11, 11)
    check(norm, definition(norm, inputs[3]), inputs, **CASES[case])


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (4, 11), (11, 4), (13, 13)])
@pytest.mark.parametrize("norm", ["softmax", "entmax", "ssa", "adaptive-temperature"])
def test_odd_lengths(norm: str, queries: int, keys: int) -> None:
    inputs = tensors(queries, keys)
    check(norm, definition(norm, inputs[3]), inputs, causal=True)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.7, 2.0, 2.5])
def test_entmax_agrees_with_the_entmax_package(alpha: float) -> None:
    inputs = tensors(11, 11)

    def weights_of(logits: Tensor, visible: Tensor) -> Tensor:
        masked = logits.masked_fill(~visible, -torch.inf)
        if alpha == 1.5:
            return entmax.entmax15(masked, -1)
        if alpha == 2.0:
            return entmax.sparsemax(masked, -1)
        return entmax.entmax_bisect(logits.masked_fill(~visible, -1e4), alpha, -1, n_iter=100)

    check("entmax", weights_of, inputs, causal=True, alpha=alpha)


@pytest.mark.parametrize("norm", ["softmax", "entmax", "sparsemax", "ssa", "adaptive-temperature"])
def test_gradcheck(norm: str) -> None:
    query, key, value, head_params = tensors(5, 5, size=1.0)

    def attend(query: Tensor, key: Tensor, value: Tensor, head_params: Tensor) -> Tensor:
        given = head_params if norm == "ssa" else None
        return normalized_attention(query, key, value, norm=norm, head_params=given, causal=True)

    torch.autograd.gradcheck(attend, (query, key, value, head_params), atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("alpha", [4.0, 16.0, 64.0])
def test_gradients_of_a_large_alpha(alpha: float) -> None:
    """Gradients are finite in float32. For distinct keys in float64 they equal finite differences."""
    query, key, value, _ = tensors(11, 11, dtype=torch.float32)
    normalized_attention(query, key, value, norm="entmax", alpha=alpha, causal=True).square().sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None and tensor.grad.isfinite().all()
    logits = torch.tensor([[[0.0, -0.2 / alpha, -0.5 / alpha, -3.0]]], dtype=torch.float64, requires_grad=True)

    def weights(logits: Tensor) -> Tensor:
        return attention_weights("entmax", logits, torch.tensor(True), alpha=alpha)[..., 0]

    assert torch.autograd.gradcheck(weights, (logits,), eps=1e-7, atol=1e-4)


@pytest.mark.parametrize("norm", NORM_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_keeps_its_dtype_and_stays_near_float64(norm: str, dtype: torch.dtype) -> None:
    inputs = tensors(11, 11, dtype=dtype, size=1.0)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    results = []
    for query, key, value, head_params in (inputs, exact):
        given = head_params if norm == "ssa" else None
        output = normalized_attention(query, key, value, norm=norm, head_params=given, causal=True)
        assert output.dtype == query.dtype
        output.square().sum().backward()
        results.append([output, query.grad, key.grad, value.grad])
    loose = 1e-4 if dtype == torch.float32 else 6e-2
    for found, right in zip(*results, strict=True):
        assert found.dtype == dtype
        assert (found.double() - right).abs().max() <= loose * right.abs().max()


@pytest.mark.parametrize("norm", ["softmax", "entmax", "sparsemax", "ssa", "adaptive-temperature"])
def test_huge_logits_give_finite_output_and_gradients(norm: str) -> None:
    query, key, value, head_params = tensors(11, 11, dtype=torch.float32, size=1e4)
    given = head_params if norm == "ssa" else None
    normalized_attention(query, key, value, norm=norm, head_params=given, causal=True).sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None and tensor.grad.isfinite().all()


def test_export_sees_one_op() -> None:
    class Attention(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return normalized_attention(query, key, value, norm="entmax", causal=True)

    inputs = tuple(tensor.detach() for tensor in tensors(11, 11, dtype=torch.float32)[:3])
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(Attention(), inputs, dynamic_shapes=({2: tokens},) * 3, strict=False)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.sharp.normalized_attention.default]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "ssa", "head_params": None}, "head_params has shape none"),
        ({"norm": "relu", "head_params": torch.ones(Q_HEADS, 2)}, r"must be \[6, 1\]: power per head"),
        ({"norm": "softmx"}, "norm 'softmx' is not known"),
        ({"norm": "entmax", "alpha": 1.0}, "alpha is 1.0"),
        ({"mask": torch.zeros(1, 1, 1, 11)}, "mask must be bool"),
        ({"alibi_slopes": torch.zeros(5)}, "alibi_slopes has shape"),
        ({"key": torch.zeros(BATCH, 4, 11, DIM)}, "the key|key heads"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict[str, object], message: str) -> None:
    query, key, value, _ = tensors(11, 11)
    given = {"query": query, "key": key, "value": value, **change}
    with pytest.raises(InputError, match=message):
        normalized_attention(given.pop("query"), given.pop("key"), given.pop("value"), **given)
