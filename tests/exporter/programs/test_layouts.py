"""Attention is found in layouts that people write: heads in the batch, groups in an einsum, a query made of weights."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.programs import program
from sharp.exporter.programs.decoder import ProgramDecoder
from sharp.exporter.programs.model import ProgramModel
from tests.exporter.programs import gpt
from tests.exporter.programs.test_recognition import TOKENS, read

SCALE = 1 / math.sqrt(gpt.WIDTH // gpt.HEADS)
WORDS = torch.randn(2, 9, gpt.WIDTH)


def visible(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf).softmax(-1)


def repeated(query: Tensor, *others: Tensor) -> list[Tensor]:
    return [tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in others]


def heads_in_the_batch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = [tensor.flatten(0, 1) for tensor in (query, *repeated(query, key, value))]
    weights = visible(torch.bmm(parts[0], parts[1].transpose(1, 2)) * SCALE)
    return torch.bmm(weights, parts[2]).view(query.shape)


def heads_in_the_batch_of_einsums(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = [tensor.reshape(-1, *tensor.shape[2:]) for tensor in (query, *repeated(query, key, value))]
    weights = visible(torch.einsum("bqd,bkd->bqk", parts[0], parts[1]) * SCALE)
    return torch.einsum("bqk,bkd->bqd", weights, parts[2]).view(query.shape)


def mask_in_the_product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = [tensor.flatten(0, 1) for tensor in (query, *repeated(query, key, value))]
    tokens = query.shape[2]
    mask = torch.full((tokens, tokens), -torch.inf).triu(1).expand(parts[0].shape[0], -1, -1)
    scores = torch.baddbmm(mask, parts[0], parts[1].transpose(1, 2), beta=2, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), parts[2]).view(query.shape)


def behind_an_ellipsis(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = repeated(query, key, value)
    weights = visible(torch.einsum("... i d, ... j d -> ... i j", query, key) * SCALE)
    return torch.einsum("...ij,...jd->...id", weights, value)


def keys_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = repeated(query, key, value)
    weights = visible(torch.einsum("bhkd,bhqd->bhqk", key, query) * SCALE)
    return torch.einsum("bhkd,bhqk->bhqd", value, weights)


def groups_in_einsums(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query = query.unflatten(1, (key.shape[1], -1))
    weights = visible(torch.einsum("bhgqd,bhkd->bhgqk", query, key) * SCALE)
    return torch.einsum("bhgqk,bhkd->bqhgd", weights, value).flatten(2, 3).transpose(1, 2)


@pytest.mark.parametrize(
    "attend",
    [
        heads_in_the_batch,
        heads_in_the_batch_of_einsums,
        mask_in_the_product,
        behind_an_ellipsis,
        keys_first,
        groups_in_einsums,
    ],
)
def test_heads_are_found_wherever_they_stand(attend: gpt.Attend) -> None:
    model = read(gpt.GPT(attend), TOKENS).model  # read refuses a program that differs from the module
    assert isinstance(model, ProgramDecoder)
    (layer,) = model.attention.layers
    assert (layer.q_heads, layer.kv_heads, layer.logits.causal) == (gpt.HEADS, 2, True)
    assert layer.logits.scale == pytest.approx(SCALE, rel=1e-6)


def heads_before_the_batch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, *repeated(query, key, value))]
    weights = visible(parts[0] @ parts[1].transpose(1, 2) * SCALE)
    return (weights @ parts[2]).unflatten(0, (gpt.HEADS, -1)).transpose(0, 1)


def test_heads_that_cannot_be_told_from_the_batch_have_no_cache() -> None:
    reason = read(gpt.GPT(heads_before_the_batch), TOKENS).no_cache
    assert reason is not None
    assert "gpt.py line" in reason
    assert "batch * heads only" in reason


def contracted_twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = repeated(query, key, value)
    weights = visible(torch.einsum("bhqxy,bhkxy->bhqk", query.unflatten(-1, (2, 4)), key.unflatten(-1, (2, 4))))
    return weights @ value


def test_an_einsum_that_is_not_known_is_named_with_its_line() -> None:
    with pytest.raises(InputError, match=r"node einsum, gpt.py line .* is an einsum that Sharp does not know"):
        read(gpt.GPT(contracted_twice), TOKENS)


class Multihead(nn.Module):
    """torch.nn.MultiheadAttention, called as people call it: the weights are returned, but not used."""

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(gpt.WIDTH, gpt.HEADS, batch_first=True, dropout=0.1)
        self.causal = causal

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        output, _ = self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding)
        return output


@pytest.mark.parametrize(
    ("made", "inputs", "causal", "masks"),
    [
        (Multihead, (WORDS,), False, 0),
        (lambda: Multihead(causal=True), (WORDS,), True, 0),
        (Multihead, (WORDS, torch.zeros(2, 9).bool()), False, 1),
    ],
)
def test_multihead_attention_that_returns_weights_has_its_heads(
    made: Callable[[], nn.Module], inputs: tuple[Tensor, ...], causal: bool, masks: int
) -> None:
    model = read(made(), *inputs).model
    assert isinstance(model, ProgramModel)
    (layer,) = model.attention.layers
    assert (layer.q_heads, layer.logits.causal, len(layer.logits.masks)) == (gpt.HEADS, causal, masks)


class Pooling(nn.Module):
    """Attention of one learned query over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, gpt.WIDTH))
        self.attention = nn.MultiheadAttention(gpt.WIDTH, gpt.HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.query.repeat(x.shape[0], 1, 1), x, x)[0]


def test_a_query_that_follows_from_weights_alone_is_one() -> None:
    model = read(Pooling(), WORDS).model
    assert isinstance(model, ProgramModel)
    assert model.attention.first.q_heads == gpt.HEADS


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).tril()
        return weights @ x


def test_where_no_attention_is_found_the_first_product_is_named() -> None:
    with pytest.raises(InputError, match=r"no attention was found .* at node matmul, test_layouts.py line .*@ x.mT"):
        read(LinearAttention(), WORDS)


class Streams(nn.Module):
    """Products of products without a norm, which are no attention, as in AltUp of Gemma 3n."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2))
        mixed = pairs @ (pairs.mT @ pairs) + pairs @ (pairs.mT @ (pairs + 1))
        return (mixed @ (pairs.mT @ pairs)).flatten(-2) / 1e4


def test_a_sum_of_products_without_a_norm_is_no_attention() -> None:
    assert read(gpt.GPT(gpt.written_out, mixing=Streams()), TOKENS).no_cache is None


@pytest.mark.parametrize("bounds", [(2, 5), (5, 2), (None, 3), (-4, None), (-2, -6)])
def test_a_slice_that_is_written_into_is_torchs(bounds: tuple[int | None, int | None]) -> None:
    tensor = torch.arange(20.0).reshape(10, 2)
    source = torch.full_like(tensor[slice(*bounds)], 7.0)
    expected = torch.slice_scatter(tensor, source, 0, *bounds)
    assert torch.equal(program._slice_scatter(tensor, source, 0, *bounds), expected)
