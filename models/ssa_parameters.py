"""SSA's parameters b and n of every head, given or learned."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sharp.core.errors import InputError

SSA_START = (1.0, 1.5)  # b and n, from the paper's App. B


class SsaValues(nn.Module):
    """SSA's b > 0 and n > 0 per head [q_heads, 2] as given values, for models that were trained elsewhere."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=False)

    def fill(self, b: float | None, n: float | None) -> None:
        """Give all heads the same b > 0 and n > 0; None leaves the present values."""
        for column, value in enumerate((b, n)):
            if value is not None:
                self.values[:, column] = value

    def forward(self) -> Tensor:
        """Return the kernel input `head_params` [q_heads, 2] with columns b and n."""
        return self.values


class SsaParameters(nn.Module):
    """SSA's learned b > 0 and n >= 1 per head, which start at 1 and 1.5 as in the paper's App. B.

    b = softplus(b_raw) and n = 1 + softplus(n_raw), so no optimizer step can leave the allowed range.
    """

    def __init__(self, q_heads: int) -> None:
        super().__init__()
        self.b_raw = nn.Parameter(torch.empty(q_heads))
        self.n_raw = nn.Parameter(torch.empty(q_heads))
        self.fill(*SSA_START)

    @torch.no_grad()
    def fill(self, b: float | None, n: float | None) -> None:
        """Give all heads the same b > 0 and n >= 1; None leaves the present values.

        Raises:
            InputError: n is below 1, which this parametrisation cannot represent.
        """
        if n is not None and n < 1:
            raise InputError(f"n of ssa is {n:g}, but a Sharp model learns n as 1 + softplus: give 1 or more")
        for raw, value in ((self.b_raw, b), (self.n_raw, None if n is None else n - 1.0)):
            if value is not None:
                raw.fill_(value + math.log(max(-math.expm1(-value), 1e-30)))  # softplus^-1 without overflow

    @torch.no_grad()
    def fill_heads(self, pairs: Tensor) -> None:
        """Give every head its own b > 0 and n > 1, from `pairs` [q_heads, 2], which are not checked."""
        for raw, values in ((self.b_raw, pairs[:, 0]), (self.n_raw, pairs[:, 1] - 1.0)):
            raw.copy_(values + (-torch.expm1(-values)).clamp(min=1e-30).log())

    def forward(self) -> Tensor:
        """Return the kernel input `head_params` [q_heads, 2] with columns b and n."""
        b = functional.softplus(self.b_raw).clamp(min=1e-6)  # softplus rounds to 0 for very negative values
        return torch.stack([b, 1.0 + functional.softplus(self.n_raw)], dim=-1)
