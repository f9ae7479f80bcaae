"""The length scales of the query: ssmax, ssmax-bias, sentmax, assmax, asentmax, log-power and llama4.

Scaling q scales its logits, so these norms need no kernel of their own. Each scale grows with L = ln(i + 2), where i is
the query's 0-based position, so L is ln of the number of visible keys plus one. The plain ln n of the papers is 0 at
the first token, and 0^gamma is infinite for gamma < 0. The code of ASEntmax's authors uses i + 2, too.
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
PROJECTION_STD = 0.02  # from the authors' Gemma 2 configuration


class QueryScale(nn.Module):
    """The learned or given factor of every query head, as a function of the length.

    | kind | factor | learned |
    | --- | --- | --- |
    | length | s L (SSMax, Nakanishi 2025) | s per head |
    | length-bias | s L + b (the same paper's form with a bias) | s, b per head |
    | head | delta + beta L^gamma (SEntmax; ASEntmax paper, G.2) | beta, gamma per head, directly |
    | token | the same, beta and gamma from the token (ASEntmax Eq. 9-10) | projections [hidden_size -> heads], biases |
    | log-power | max(1, L / L_onset)^gamma | nothing: gamma per head is given |
    | llama4 | 1 + beta ln(1 + floor((i + 1) / onset)) (Llama 4's temperature tuning) | nothing: beta per head |

    For kind token, beta = softplus(w_beta h + c_beta) > 0 and gamma = 2 tanh(w_gamma h + c_gamma), where h is the
    attention block's input and delta = 1. If `gamma` is given, every head and token has this gamma, and only beta is
    learned (the paper's Table 5). `scaled_heads` says for every head whether the scale applies to it (under NAPE to
    heads without position). Only these heads have parameters, in their order; the others have the factor 1.

    Kinds log-power and llama4 leave a model unchanged up to `onset` tokens, by default the trained context. So they are
    for models that were trained without a scale, either fitted (`sharp fit-length-scale`) or by formula. With gamma 1,
    log-power is Qwen's `use_logn_attn` (with n + 1 for n). Ministral 3 has the scale of Llama 4 in its own code.

    Start values are those of the papers and of ASEntmax's code: s is 1 over the mean of L in the trained context (0.168
    at 1,024 tokens), beta is uniform in [0.1, 1], gamma is normal with deviation 0.1, and projections are normal with
    deviation 0.02 and zero bias. Gamma of log-power starts at 1, beta of llama4 at 0.1.
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
        self.log_length_offset: int | Tensor = LOG_LENGTH_OFFSET  # a tensor [q_heads] if heads differ
        self.onset = trained_context
        self.scaled_heads = tuple(scaled_heads)
        count = sum(self.scaled_heads)
        if kind == "length":
            self.s = nn.Parameter(torch.full((count,), 1.0 / mean_log_length(trained_context)))
        elif kind == "length-bias":
            # The scale starts at 1 at the end of the trained context.
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
        """Return the factors [batch, tokens, q_heads].

        `hidden` [batch, tokens, hidden_size], the attention block's input, is read by kind token only. `positions`
        [batch, tokens] are one less than the number of keys that a token sees: 0-based positions in a decoder.
        """
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
        # Index of each head's factor among the factors of the scaled heads, which are followed by a 1.
        count = sum(self.scaled_heads)
        indices = [sum(self.scaled_heads[:head]) if scaled else count for head, scaled in enumerate(self.scaled_heads)]
        with_one = torch.cat([factor, torch.ones_like(factor[..., :1])], dim=-1)
        return with_one[..., torch.tensor(indices, device=factor.device)]

    def _gamma(self, hidden: Tensor) -> Tensor | float:
        """Return gamma, the exponent of the scale: a fixed number, one per head, or one per token from `hidden`."""
        if self.gamma is not None:
            return self.gamma
        if self.kind == "head":
            return self.gamma_exponent
        return GAMMA_RANGE * torch.tanh(_project(self.w_gamma, hidden))


def mean_log_length(trained_context: int) -> float:
    """Return the mean of L = ln(i + 2) over the positions i of a trained context, a number of tokens."""
    return math.lgamma(trained_context + LOG_LENGTH_OFFSET) / trained_context  # ln (n + 1)! / n


def _projection(hidden_size: int, heads: int) -> nn.Linear:
    """Return a linear layer to one number per head, with small random weights and no bias."""
    linear = nn.Linear(hidden_size, heads)
    nn.init.normal_(linear.weight, std=PROJECTION_STD)
    nn.init.zeros_(linear.bias)
    return linear


def _project(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """Project hidden states, whose dtype may differ from that of the weights, and return float32."""
    projected: Tensor = linear(hidden.to(linear.weight.dtype))
    return projected.float()
