"""The learned length scales of the query: ssmax, sentmax, assmax and asentmax.

Scaling q scales its logits, so these schemes need no kernel of their own. Each grows with L = ln(i + 2), i the
query's 0-based position: ln of the number of visible keys plus one. The plain ln n of the papers is 0 at the first
token, and 0^gamma is infinite for gamma < 0; ASEntmax's authors' code uses i + 2 too.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sharp.models.normalizers import ScaleKind

LOG_LENGTH_OFFSET = 2
DELTA = 1.0
GAMMA_RANGE = 2.0


class QueryScale(nn.Module):
    """The factor of every query head.

    | kind | factor | learned per head |
    | --- | --- | --- |
    | length | s L + b (SSMax, Nakanishi 2025) | s, b |
    | head | delta + beta L^gamma | scalars behind beta and gamma |
    | token | the same, beta and gamma from the token (ASEntmax Eq. 9-10) | w_beta, w_gamma [hidden_size] |

    beta = softplus(w_beta h) > 0 and gamma = 2 tanh(w_gamma h), h the attention block's input, delta = 1. With `gamma`
    it is that number for every head and token, and only beta is learned (the paper's Table 5).
    `scaled_heads` [q_heads] marks the heads that the scale applies to (under NAPE those without position); the others
    have the factor 1.
    """

    scaled_heads: Tensor

    def __init__(
        self,
        kind: ScaleKind,
        hidden_size: int,
        scaled_heads: Tensor,
        trained_context: int,
        gamma: float | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.gamma = gamma
        self.log_length_offset: int | Tensor = LOG_LENGTH_OFFSET  # a tensor [q_heads] where heads differ
        q_heads = scaled_heads.numel()
        self.register_buffer("scaled_heads", scaled_heads, persistent=False)
        if kind == "length":
            # Starts as plain attention at the end of the trained context.
            start = 1.0 / math.log(trained_context - 1 + LOG_LENGTH_OFFSET)
            self.s = nn.Parameter(torch.full((q_heads,), start))
            self.b = nn.Parameter(torch.zeros(q_heads))
        elif kind == "head":
            self.beta_raw = nn.Parameter(torch.zeros(q_heads))
            if gamma is None:
                self.gamma_raw = nn.Parameter(torch.zeros(q_heads))
        elif kind == "token":
            self.w_beta = nn.Linear(hidden_size, q_heads, bias=False)
            if gamma is None:
                self.w_gamma = nn.Linear(hidden_size, q_heads, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The factors [batch, tokens, q_heads] for hidden [batch, tokens, hidden_size], positions [batch, tokens]."""
        log_length = torch.log(positions.unsqueeze(-1).float() + self.log_length_offset)  # [batch, tokens, 1 | q_heads]
        if self.kind == "length":
            factor = self.s * log_length + self.b
        else:
            beta = functional.softplus(self.beta_raw if self.kind == "head" else _project(self.w_beta, hidden))
            factor = DELTA + beta * log_length ** self._gamma(hidden)
        return torch.where(self.scaled_heads, factor, 1.0)

    def _gamma(self, hidden: Tensor) -> Tensor | float:
        if self.gamma is not None:
            return self.gamma
        raw: Tensor = self.gamma_raw if self.kind == "head" else _project(self.w_gamma, hidden)
        return GAMMA_RANGE * torch.tanh(raw)


def _project(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """Float32, of hidden states that may be of another dtype than the weights."""
    projected: Tensor = linear(hidden.to(linear.weight.dtype))
    return projected.float()
