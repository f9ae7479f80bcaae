"""A GPT in one file, as people write it, without any code of Sharp. Tests vary its function `attend`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, CONTEXT = 257, 32, 4, 64

# maps tensors [batch, heads, tokens, dim] to the output of attention
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def logits(query: Tensor, key: Tensor) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])


def weighted(scores: Tensor, value: Tensor, window: int = CONTEXT) -> Tensor:
    tokens = scores.shape[-1]
    visible = torch.ones(tokens, tokens).tril().triu(1 - window) > 0
    weights = functional.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    weights = functional.dropout(weights, 0.1, training=False)
    return weights @ value.repeat_interleave(scores.shape[1] // value.shape[1], 1)


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return weighted(logits(query, key), value)


def alibi(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    index = torch.arange(query.shape[2])
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    return weighted(logits(query, key) - slopes[:, None, None] * (index[:, None] - index).abs(), value)


def capped_in_a_window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return weighted(5 * torch.tanh(logits(query, key) / 5), value, window=20)


def einsums(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", query, key.repeat_interleave(2, 1)) / math.sqrt(query.shape[-1])
    tokens = scores.shape[-1]
    scores = scores + torch.full((tokens, tokens), -1e9).triu(1)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value.repeat_interleave(2, 1))


def expanded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention with grouped queries by expanding keys and values, as litgpt's and Llama's own code do."""
    key, value = (
        tensor[:, :, None].expand(-1, -1, query.shape[1] // tensor.shape[1], -1, -1).flatten(1, 2)
        for tensor in (key, value)
    )
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def of_a_type(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention in the query's type, with a mask of the logits' size, as torchtune's Gemma 2 does."""
    scores = logits(query, key)
    scores = scores + torch.full_like(scores, -1e9).triu(1)
    weights = scores.float().softmax(-1).type_as(query)
    return weights @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)


def written_into(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention after scaling some heads in place, as github.com/deep-spin/asentmax does."""
    query = query.clone()
    query[:, -2:] = query[:, -2:].clone() * torch.arange(2, query.shape[2] + 2).log()[:, None]
    return fused(query, key, value)


def with_weights(normalize: Callable[[Tensor], Tensor]) -> Attend:
    """Return attention with `normalize` in place of softmax."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = logits(query, key)
        visible = torch.ones(scores.shape[-2:]).tril() > 0
        weights = normalize(scores.masked_fill(~visible, -torch.inf))
        return weights @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    return attend


def ssa_of_the_authors(scores: Tensor) -> Tensor:
    """Return SSA weights as github.com/omyokun/SSA computes them, with b = exp(0.3) and n = exp(0.4)."""
    a, n = torch.tensor([0.3]).exp(), torch.tensor(0.4).exp()
    sign = torch.where(scores == 0, 1.0, scores.sign())
    powers = (1 + a * scores.abs()) ** (sign * n)
    return powers / powers.sum(-1, keepdim=True)


def adaptive_of_the_authors(scores: Tensor) -> Tensor:
    """Return adaptive-temperature weights as Figure 4 of the paper computes them."""
    probabilities = scores.softmax(-1)
    entropy = -(probabilities * torch.log(probabilities + 1e-9)).sum(-1, keepdim=True)
    polynomial = (((-0.037 * entropy + 0.481) * entropy - 2.3) * entropy + 4.917) * entropy - 1.791
    return (scores * torch.where(entropy > 0.5, polynomial.clamp(min=1.0), 1.0)).softmax(-1)


class Attention(nn.Module):
    def __init__(self, attend: Attend, kv_heads: int) -> None:
        super().__init__()
        self.attend, self.dim = attend, WIDTH // HEADS
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, kv_heads * self.dim) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return self.out(self.attend(*parts).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A small GPT. A test may put a module `mixing` between the embedding and the blocks."""

    def __init__(
        self,
        attend: Attend = fused,
        kv_heads: int = 2,
        layers: int = 1,
        *,
        last: bool = False,
        mixing: nn.Module | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixing = nn.Identity() if mixing is None else mixing
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.attention = nn.ModuleList(Attention(attend, kv_heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.last = last

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mixing(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        return self.head(self.norm(x[:, [-1]] if self.last else x))
