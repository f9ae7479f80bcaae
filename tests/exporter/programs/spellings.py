"""Equal spellings of attention, put together at random from parts that people write, without any code of Sharp.

A spelling has a scale, a product, a mask, a norm and a product. Each is written in one of several ways that are equal
in real numbers, and the mask is at one of the places where its norm allows it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import entmax
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

HEADS, DIM = 4, 6
SCALE = DIM**-0.5
INFINITE = -torch.inf
B = torch.tensor([0.6, 0.9, 1.1, 1.4]).view(1, HEADS, 1, 1)
N = torch.tensor([0.7, 1.0, 1.5, 2.2]).view(1, HEADS, 1, 1)
BIAS = torch.tensor([-2.0, -1.0, 0.0, 0.5]).view(1, HEADS, 1, 1)
SOURCES = ("tril", "arange", "triu", "window")
WINDOW = 5

Function = Callable[[Tensor], Tensor]


def mask_of(source: str, logits: Tensor) -> Tensor:
    """Return which keys a query sees, bool [queries, keys], computed from sizes in the way that `source` names."""
    tokens = logits.shape[-1]
    index = torch.arange(tokens)
    distance = index[:, None] - index
    if source == "window":
        return (distance >= 0) & (distance < WINDOW)
    if source == "arange":
        return index[None, :] <= index[:, None]
    if source == "triu":
        return ~torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return torch.ones(tokens, tokens).tril() > 0


HIDE_LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda z, mask: z.masked_fill(~mask, INFINITE),
    "where": lambda z, mask: torch.where(mask, z, INFINITE),
    "added": lambda z, mask: z + torch.zeros(mask.shape).masked_fill(~mask, INFINITE),
}
HIDE_FINITELY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "finfo.min": lambda z, mask: z.masked_fill(~mask, torch.finfo(z.dtype).min),
    "-1e9": lambda z, mask: z + (~mask).to(z.dtype) * -1e9,
    "-1e4": lambda z, mask: torch.where(mask, z, -1e4),
}
HIDE_POWERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled with 0": lambda powers, mask: powers.masked_fill(~mask, 0.0),
    "times mask": lambda powers, mask: powers * mask,
    "where, else 0": lambda powers, mask: torch.where(mask, powers, 0.0),
    "times a mask of floats": lambda powers, mask: powers * mask.to(powers.dtype),
    "tril of weights": lambda powers, mask: torch.where(mask.tril(), powers.tril(), 0.0),
}

# Functions that return the logarithm of a weight, up to a constant for each row.
LOG_WEIGHTS: dict[str, dict[str, Function]] = {
    "softmax": {"z": lambda z: z, "log of exp": lambda z: z.exp().log()},
    "ssa": {
        "sign": lambda z: torch.sign(z) * N * torch.log1p(B * z.abs()),
        "log": lambda z: N * z.sign() * torch.log(1 + B * z.abs()),
        "where": lambda z: torch.where(z >= 0, N * torch.log1p(B * z.relu()), -N * torch.log1p(B * (-z).relu())),
        "log2": lambda z: math.log(2) * N * torch.sign(z) * torch.log2(1 + (B * z).abs()),
    },
}
POWERS: dict[str, dict[str, Function]] = {
    "softmax": {"exp": torch.exp, "exp2": lambda z: torch.exp2(z * math.log2(math.e)), "pow": lambda z: math.e**z},
    "ssa": {
        "sign in the exponent": lambda z: (1 + B * z.abs()) ** (N * torch.sign(z)),
        "two powers": lambda z: torch.where(z >= 0, (1 + B * z.abs()) ** N, (1 + B * z.abs()) ** -N),
        "reciprocal": lambda z: torch.where(z < 0, 1 / (1 + B * z.abs()).pow(N), (1 + B * z.abs()).pow(N)),
        "exp": lambda z: torch.exp(LOG_WEIGHTS["ssa"]["sign"](z)),
        "exp2": lambda z: torch.exp2(N * torch.sign(z) * torch.log2(1 + B * z.abs())),
    },
}
OF_LOGITS: dict[str, dict[str, Function]] = {  # a weight follows from its own logit, and is 0 for a masked key
    "sigmoid": {
        "sigmoid": torch.sigmoid,
        "exp": lambda z: 1 / (1 + torch.exp(-z)),
        "tanh": lambda z: 0.5 * (1 + torch.tanh(z / 2)),
        "logsigmoid": lambda z: functional.logsigmoid(z).exp(),
    },
    "biased sigmoid": {
        "sigmoid": lambda z: torch.sigmoid(z + BIAS),
        "exp": lambda z: 1 / (1 + torch.exp(-(z + BIAS))),
    },
    "relu": {
        "relu": torch.relu,
        "clamp": lambda z: z.clamp(min=0),
        "maximum": lambda z: torch.maximum(z, torch.zeros(())),
        "where": lambda z: torch.where(z > 0, z, 0.0),
    },
    "relu2": {
        "square": lambda z: z.relu().square(),
        "product": lambda z: z.relu() * z.relu(),
        "pow": lambda z: z.clamp(min=0) ** 2,
    },
}


def sparsemax_by_sorting(z: Tensor) -> Tensor:
    ordered = z.sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1)
    summed = ordered.masked_fill(ordered == INFINITE, -1e4).cumsum(-1)
    support = (1 + count * ordered > summed).sum(-1, keepdim=True)
    threshold = (summed.gather(-1, support - 1) - 1) / support
    return (z - threshold).clamp(min=0)


def entmax_by_bisection(z: Tensor, alpha: float) -> Tensor:
    z = z * (alpha - 1)
    low = z.amax(-1, keepdim=True) - 1
    high = low + 1
    for _ in range(40):
        middle = (low + high) / 2
        enough = ((z - middle).clamp(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    weights = (z - low).clamp(min=0) ** (1 / (alpha - 1))
    return weights / weights.sum(-1, keepdim=True)


def adaptive(z: Tensor, *, by_log_softmax: bool) -> Tensor:
    probabilities = z.softmax(-1)
    logarithms = z.log_softmax(-1).masked_fill(z == INFINITE, 0.0) if by_log_softmax else (probabilities + 1e-9).log()
    entropy = -(probabilities * logarithms).sum(-1, keepdim=True)
    polynomial = -0.037 * entropy**4 + 0.481 * entropy**3 - 2.3 * entropy**2 + 4.917 * entropy - 1.791
    return (z * torch.where(entropy > 0.5, polynomial.clamp(min=1.0), 1.0)).softmax(-1)


def softpick(z: Tensor) -> Tensor:
    top = z.amax(-1, keepdim=True)
    parts = torch.exp(z - top) - torch.exp(-top)
    return parts.relu() / (torch.where(z.isfinite(), parts.abs(), 0).sum(-1, keepdim=True) + 1e-8)


OF_ROWS: dict[str, dict[str, Function]] = {  # norms of whole rows, for which the logits must be masked
    "entmax 1.5": {"package": partial(entmax.entmax15, dim=-1), "bisection": partial(entmax_by_bisection, alpha=1.5)},
    "entmax 1.4": {"bisection": partial(entmax_by_bisection, alpha=1.4)},
    "sparsemax": {"package": partial(entmax.sparsemax, dim=-1), "sorting": sparsemax_by_sorting},
    "adaptive": {
        "published": partial(adaptive, by_log_softmax=False),
        "log_softmax": partial(adaptive, by_log_softmax=True),
    },
    "softpick": {"published": softpick},
}
CHEAP = ("softmax", "ssa", "sigmoid", "biased sigmoid", "relu", "relu2", "sparsemax", "adaptive", "softpick")
EVERY = (*CHEAP, "entmax 1.5", "entmax 1.4")  # entmax by bisection is slow to trace, because torch.export unrolls it


@dataclass(frozen=True)
class Spelling:
    """Attention in one spelling; `parts` names the choice of each part by the keys of the tables above."""

    norm: str
    parts: dict[str, Any]

    @property
    def window(self) -> int:
        """The sliding window of the spelling's mask; -1 for none."""
        return WINDOW if self.parts["source"] == "window" else -1

    @property
    def scale_before(self) -> float:
        """The factor by which query and key are multiplied before their product."""
        return 1.0 if self.parts["scale"] in ("logits", "divided") else SCALE

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = self.parts
        before, behind = {"query": (SCALE, 1), "both": (SCALE**0.5, SCALE**0.5), "key": (1, SCALE)}.get(
            parts["scale"], (1, 1)
        )
        z = self._product(query * before, key * behind)
        if parts["scale"] == "logits":
            z = z * SCALE
        elif parts["scale"] == "divided":
            z = z / math.sqrt(query.shape[-1])
        if parts["cast"]:
            z = z.float()
        return self._mixed(z, mask_of(parts["source"], z), value)

    def _product(self, query: Tensor, key: Tensor) -> Tensor:
        kind = self.parts["product"]
        if kind == "einsum":
            return torch.einsum("bhqd,bhkd->bhqk", query, key)
        if kind == "turned":
            return (key @ query.transpose(-1, -2)).transpose(-1, -2)
        if kind == "bmm":
            product = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
            return product.unflatten(0, (-1, HEADS))
        return query @ key.transpose(-1, -2)

    def _mixed(self, z: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        parts, divided = self.parts, None
        hide = (HIDE_LOGITS | HIDE_FINITELY | HIDE_POWERS)[parts["hide"]]
        if parts["place"] == "logits":
            z = hide(z, mask)
        if self.norm in LOG_WEIGHTS and parts["form"] in ("softmax", "log_softmax"):
            levels = LOG_WEIGHTS[self.norm][parts["transform"]](z)
            if parts["place"] == "levels":
                levels = hide(levels, mask)
            weights = levels.softmax(-1) if parts["form"] == "softmax" else levels.log_softmax(-1).exp()
        elif self.norm in POWERS:
            powers = POWERS[self.norm][parts["transform"]](z)
            if parts["place"] == "powers":
                powers = hide(powers, mask)
            total = powers.sum(-1, keepdim=True)
            divided = total if parts["form"] == "divided afterwards" else None
            weights = powers if divided is not None else powers / total
        else:
            weights = (OF_LOGITS | OF_ROWS)[self.norm][parts["transform"]](z)
            if parts["place"] == "powers":
                weights = hide(weights, mask)
        weights = functional.dropout(weights, 0.1, training=False).type_as(value)
        if parts["mixing"] == "einsum":
            output = torch.einsum("bhqk,bhkd->bhqd", weights, value)
        elif parts["mixing"] == "turned":
            output = (value.transpose(-1, -2) @ weights.transpose(-1, -2)).transpose(-1, -2)
        else:
            output = weights @ value
        return output if divided is None else output / divided


@st.composite
def spellings(draw: st.DrawFn, norms: tuple[str, ...] = CHEAP) -> Spelling:
    """Generate a spelling of one of `norms`."""
    norm = draw(st.sampled_from(norms))
    parts: dict[str, Any] = {
        "scale": draw(st.sampled_from(("query", "key", "both", "logits", "divided"))),
        "product": draw(st.sampled_from(("matmul", "einsum", "turned", "bmm"))),
        "mixing": draw(st.sampled_from(("matmul", "einsum", "turned"))),
        "source": draw(st.sampled_from(SOURCES)),
        "cast": draw(st.booleans()),
        "form": "rows",
    }
    places = ["logits", "powers"]
    if norm in LOG_WEIGHTS:
        parts["form"] = draw(st.sampled_from(("softmax", "log_softmax", "over its sum", "divided afterwards")))
        if parts["form"] in ("softmax", "log_softmax"):
            places = ["logits", "levels"]
            table = LOG_WEIGHTS[norm]
        else:
            table = POWERS[norm]
        if parts["form"] == "divided afterwards":
            parts["mixing"] = draw(st.sampled_from(("matmul", "einsum")))
    elif norm in OF_LOGITS:
        table = OF_LOGITS[norm]
    else:
        table, places = OF_ROWS[norm], ["logits"]
    parts["transform"] = draw(st.sampled_from(sorted(table)))
    parts["place"] = place = draw(st.sampled_from(places))
    hidden = HIDE_POWERS if place == "powers" else HIDE_LOGITS
    if (norm == "softmax" and place == "logits") or place == "levels":
        hidden = hidden | HIDE_FINITELY
    parts["hide"] = draw(st.sampled_from(sorted(hidden)))
    return Spelling(norm, parts)


class Attentions(nn.Module):
    """Several attentions over one query, key and value, so that one trace covers all of them."""

    def __init__(self, attentions: list[Callable[[Tensor, Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        self.attentions = attentions

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.stack([attend(query, key, value) for attend in self.attentions])
