"""The length scales of the query: ssmax, ssmax-bias, sentmax, assmax, asentmax, log-power and llama4.

Scaling q scales its logits, so these schemes need no kernel of their own. Each grows with L = ln(i + 2), i the
query's 0-based position: ln of the number of visible keys plus one. The plain ln n of the papers is 0 at the first
token, and 0^gamma is infinite for gamma < 0; ASEntmax's authors' code uses i + 2 too.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sharp.models.norms import ScaleKind

LOG_LENGTH_OFFSET = 2
DELTA = 1.0
GAMMA_RANGE = 2.0
PROJECTION_STD = 0.02  # of the authors' Gemma 2 configuration


class QueryScale(nn.Module):
    """The factor of every query head.

    | kind | factor | learned |
    | --- | --- | --- |
    | length | s L (SSMax, Nakanishi 2025) | s per head |
    | length-bias | s L + b (the same paper's form with a bias) | s, b per head |
    | head | delta + beta L^gamma (SEntmax; ASEntmax paper, G.2) | beta, gamma per head, directly |
    | token | the same, beta and gamma from the token (ASEntmax Eq. 9-10) | projections [hidden_size -> heads], biases |
    | log-power | max(1, L / L_onset)^gamma | nothing: gamma per head is given |
    | llama4 | 1 + beta ln(1 + floor((i + 1) / onset)) (Llama 4's temperature tuning) | nothing: beta per head |

    Of kind token, beta = softplus(w_beta h + c_beta) > 0 and gamma = 2 tanh(w_gamma h + c_gamma), h the attention
    block's input, delta = 1. With `gamma` it is that number for every head and token, and only beta is learned (the
    paper's Table 5). `scaled_heads` says of every head whether the scale applies to it (under NAPE to those
    without position); only those have parameters, in their order, and the others have the factor 1.

    The last two leave a model as it is up to `onset` tokens, the trained context unless it is set, so they are for
    models that were trained without: fitted to one (`sharp fit-length-scale`), or by formula. With gamma 1 log-power is
    Qwen's `use_logn_attn` (with n + 1 for n); Ministral 3 has the scale of Llama 4 in its own code.

    Start values are those of the papers and of ASEntmax's code: s is 1 over the mean of L in the trained context (0.168
    at 1,024 tokens), beta uniform in [0.1, 1] and gamma normal with deviation 0.1, projections normal with deviation
    0.02 and without bias; gamma 1 of log-power, beta 0.1 of llama4.
    """

    def __init__(
        self,
        kind: ScaleKind,
        hidden_size: int,
        scaled_heads: Sequence[bool],
        trained_context: int,
        gamma: float | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.gamma = gamma
        self.log_length_offset: int | Tensor = LOG_LENGTH_OFFSET  # a tensor [q_heads] where heads differ
        self.onset = trained_context
        self.scaled_heads = tuple(scaled_heads)
        count = sum(self.scaled_heads)
        if kind == "length":
            self.s = nn.Parameter(torch.full((count,), 1.0 / mean_log_length(trained_context)))
        elif kind == "length-bias":
            # Starts as plain attention at the end of the trained context.
            start = 1.0 / math.log(trained_context - 1 + LOG_LENGTH_OFFSET)
            self.s = nn.Parameter(torch.full((count,), start))
            self.b = nn.Parameter(torch.zeros(count))
        elif kind == "head":
            self.beta = nn.Parameter(torch.empty(count).uniform_(0.1, 1.0))
            if gamma is None:
                self.gamma_exponent = nn.Parameter(torch.empty(count).normal_(0.0, 0.1))
        elif kind == "token":
            self.w_beta = _projection(hidden_size, count)
            if gamma is None:
                self.w_gamma = _projection(hidden_size, count)
        elif kind == "log-power":
            self.gamma_exponent = nn.Parameter(torch.ones(count), requires_grad=False)
        elif kind == "llama4":
            self.beta = nn.Parameter(torch.full((count,), 0.1), requires_grad=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The factors [batch, tokens, q_heads] for hidden [batch, tokens, hidden_size], positions [batch, tokens]."""
        offset = self.log_length_offset
        if isinstance(offset, Tensor):
            offset = offset[list(self.scaled_heads)]
        log_length = torch.log(positions.unsqueeze(-1).float() + offset)  # [batch, tokens, 1 or scaled heads]
        if self.kind == "length":
            factor = self.s * log_length
        elif self.kind == "length-bias":
            factor = self.s * log_length + self.b
        elif self.kind == "log-power":
            factor = (log_length / math.log(self.onset - 1 + LOG_LENGTH_OFFSET)).clamp(min=1) ** self.gamma_exponent
        elif self.kind == "llama4":
            steps = torch.floor((positions.unsqueeze(-1).float() + 1) / self.onset)
            factor = 1 + self.beta * torch.log1p(steps)
        else:
            beta = self.beta if self.kind == "head" else functional.softplus(_project(self.w_beta, hidden))
            factor = DELTA + beta * log_length ** self._gamma(hidden)
        if all(self.scaled_heads):
            return factor
        # Each head's factor, in those of the scaled heads with a 1 behind them.
        count = sum(self.scaled_heads)
        indices = [sum(self.scaled_heads[:head]) if scaled else count for head, scaled in enumerate(self.scaled_heads)]
        with_one = torch.cat([factor, torch.ones_like(factor[..., :1])], dim=-1)
        return with_one[..., torch.tensor(indices, device=factor.device)]

    def _gamma(self, hidden: Tensor) -> Tensor | float:
        if self.gamma is not None:
            return self.gamma
        if self.kind == "head":
            return self.gamma_exponent
        return GAMMA_RANGE * torch.tanh(_project(self.w_gamma, hidden))


def mean_log_length(trained_context: int) -> float:
    """The mean of L over the positions of the trained context."""
    return math.lgamma(trained_context + LOG_LENGTH_OFFSET) / trained_context  # ln (n + 1)! / n


def _projection(hidden_size: int, heads: int) -> nn.Linear:
    linear = nn.Linear(hidden_size, heads)
    nn.init.normal_(linear.weight, std=PROJECTION_STD)
    nn.init.zeros_(linear.bias)
    return linear


def _project(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """Float32, of hidden states that may be of another dtype than the weights."""
    projected: Tensor = linear(hidden.to(linear.weight.dtype))
    return projected.float()
