"""The registry of every `--norm` name, and SSA's parameters.

A scheme is a scale of the query (`sharp.models.query_scale`) and a normalizer (`sharp.plugins.ops.torch_normalizers`).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sharp.plugins.custom import normalizer as custom
from sharp.plugins.errors import InputError

ScaleKind = Literal["none", "length", "length-bias", "head", "token", "log-power", "llama4"]


@dataclass(frozen=True)
class Norm:
    """One `--norm`: how the query is scaled, which normalizer makes the weights, and what is learned for it.

    `alpha` matters to entmax only. `head_parameters` names the columns of the kernel input `head_params` [q_heads, P]
    that are learned, before that of a model's sinks; `head_constants` are columns that are the same in every head. What
    the query scale learns is in `sharp.models.query_scale`.
    """

    name: str
    normalizer: str  # of the op, or a user's, whose name is the norm's
    scale_kind: ScaleKind = "none"
    head_parameters: tuple[str, ...] = ()
    head_constants: tuple[float, ...] = ()
    alpha: float = 1.5

    def own_params(self, learned: Tensor | None, q_heads: int) -> Tensor | None:
        """The columns of `head_params` [q_heads, P] of its own: its constants, or else those that are learned."""
        return torch.tensor(self.head_constants).expand(q_heads, -1) if self.head_constants else learned


NORMS: dict[str, Norm] = {
    norm.name: norm
    for norm in (
        Norm("softmax", "softmax"),
        Norm("fixed-temperature", "softmax"),  # its temperature is part of the model's `scale`
        Norm("adaptive-temperature", "adaptive_softmax"),
        Norm("ssmax", "softmax", scale_kind="length"),
        Norm("ssmax-bias", "softmax", scale_kind="length-bias"),
        Norm("assmax", "softmax", scale_kind="token"),
        Norm("entmax", "entmax"),
        Norm("sparsemax", "entmax", alpha=2.0),
        Norm("sentmax", "entmax", scale_kind="head"),
        Norm("asentmax", "entmax", scale_kind="token"),
        Norm("ssa", "ssa", head_parameters=("b", "n")),
        Norm("sigmoid", "sigmoid"),
        Norm("sigmoid-n", "sigmoid", head_constants=(0.0, 1.0)),  # with the bias -ln n, Ramapuram et al. 2024
        Norm("relu", "relu"),
        Norm("relu-n", "relu", head_constants=(1.0,)),  # over n, Wortsman et al. 2023
        Norm("relu2", "relu2"),
        Norm("relu2-n", "relu2", head_constants=(1.0,)),
        Norm("softpick", "softpick"),
        Norm("log-power", "softmax", scale_kind="log-power"),
        Norm("llama4", "softmax", scale_kind="llama4"),
    )
}


NORMS |= {name: Norm(name, name) for name in custom.names() if name not in NORMS}


def get_norm(name: str) -> Norm:
    """The scheme called `name`.

    Raises:
        InputError: there is no such scheme; the message lists those that exist.
    """
    if name not in NORMS and custom.is_custom(name):  # added since
        return Norm(name, name)
    if name not in NORMS:
        raise InputError(f"norm {name!r} is not known; choose one of: {', '.join(NORMS)}")
    return NORMS[name]


SSA_START = (1.0, 1.5)  # b and n, App. B


class SsaValues(nn.Module):
    """SSA's b > 0 and n >= 1 per head as they are, [q_heads, 2]: of a model that somebody else has trained."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=False)

    def fill(self, b: float | None, n: float | None) -> None:
        """Give all heads the same b > 0 and n >= 1; None leaves them."""
        for column, value in enumerate((b, n)):
            if value is not None:
                self.values[:, column] = value

    def forward(self) -> Tensor:
        """The kernel input `head_params` [q_heads, 2]: columns b and n."""
        return self.values


class SsaParameters(nn.Module):
    """SSA's learned b > 0 and n >= 1 per head; they start at 1 and 1.5 as in the paper's App. B.

    b = softplus(b_raw) and n = 1 + softplus(n_raw), so no step of an optimizer can leave the allowed range.
    """

    def __init__(self, q_heads: int) -> None:
        super().__init__()
        self.b_raw = nn.Parameter(torch.empty(q_heads))
        self.n_raw = nn.Parameter(torch.empty(q_heads))
        self.fill(*SSA_START)

    @torch.no_grad()
    def fill(self, b: float | None, n: float | None) -> None:
        """Give all heads the same b > 0 and n >= 1; None leaves them."""
        for raw, value in ((self.b_raw, b), (self.n_raw, None if n is None else n - 1.0)):
            if value is not None:
                raw.fill_(value + math.log(max(-math.expm1(-value), 1e-30)))  # softplus^-1 without overflow

    def forward(self) -> Tensor:
        """The kernel input `head_params` [q_heads, 2]: columns b and n."""
        b = functional.softplus(self.b_raw).clamp(min=1e-6)  # softplus rounds to 0 far out
        return torch.stack([b, 1.0 + functional.softplus(self.n_raw)], dim=-1)
