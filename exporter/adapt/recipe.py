"""The recipe of a distillation: steps, learning rates, batches, and the path from softmax to the norm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FIRST_ALPHA = 1.05  # entmax's alpha at the start of the path from softmax


@dataclass(frozen=True)
class Recipe:
    """The steps, batches and learning rates of a run. A run is resumed only with the same recipe.

    `long_steps` of the `steps` read `long_batch` sequences of `long_length` tokens, the other steps `batch` sequences
    of `length`. Long steps are spread evenly, because at the end, where the learning rate is nearly 0, they would
    teach nothing. A batch is shared by all processes. `adapter_rate` and `norm_rate` are the highest learning rates of
    adapters and of the norms' parameters, reached after `warmup` steps; `clip` is the largest norm of the gradients.
    """

    steps: int
    length: int
    batch: int
    long_steps: int = 0
    long_length: int = 0
    long_batch: int = 1
    seed: int = 0
    path: bool = True  # reach entmax from softmax, instead of starting with its alpha
    adapter_rate: float = 1e-3
    norm_rate: float = 2e-2
    warmup: int = 10
    clip: float = 1.0
    dtype: str = "float32"  # dtype of matrix products; parameters, attention and measurements are float32

    def shape_at(self, step: int) -> tuple[int, int]:
        """Return the number of sequences, over all processes, and of tokens of each sequence in a step (from 0)."""
        before, after = (count * self.long_steps // self.steps for count in (step, step + 1))
        return (self.long_batch, self.long_length) if after > before else (self.batch, self.length)

    def rate_at(self, step: int) -> float:
        """Return the factor of the learning rates in a step (from 0): a linear warm-up times half a cosine to 0."""
        return min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    @property
    def tokens(self) -> int:
        """The number of tokens of the whole run, over all processes."""
        short = (self.steps - self.long_steps) * self.length * self.batch
        return short + self.long_steps * self.long_length * self.long_batch


def fastest_dtype(device: torch.device) -> str:
    """Return "bfloat16" if an x86 CPU or a GPU has instructions for it; otherwise "float32", which is then faster."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bfloat16" if found.get("avx512_bf16") or found.get("amx_bf16") else "float32"


def batch_at(recipe: Recipe, tokens: Tensor, step: int) -> Tensor:
    """Return the sequences int64 [batch, length] of a step, cut from `tokens` int64 [n] at random positions.

    The positions depend only on the recipe (with its seed), the step and n, which must be at least the step's length.
    """
    batch, length = recipe.shape_at(step)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - length + 1, (batch,), generator=generator).tolist()
    return torch.stack([tokens[start : start + length] for start in starts])


def alpha_at(share: float, target: float) -> float:
    """Return entmax's alpha of a step before which this `share` (0 to 1) of the run lies.

    Alpha grows from near 1, where entmax is softmax, to `target` in the middle of the run. After 100 steps on SmolLM2,
    perplexity was 4 % lower than with alpha 1.5 from the first step on (bench/results/adapt_walk_entmax.json).
    """
    return FIRST_ALPHA + (target - FIRST_ALPHA) * min(1.0, 2 * share)


def temperature_at(share: float, target: Sequence[float]) -> tuple[float, ...]:
    """Return coefficients of the adaptive temperature, highest power first, of a step before which this `share` lies.

    The polynomial of the step is 1 + w (p - 1), where p is the norm's polynomial and w grows from 0 (softmax) to 1 in
    the first half of the run. Only modules need this path, because their queries have no factor that could start at 1 /
    p. `target` has the coefficients of p.
    """
    way = min(1.0, 2 * share)
    *higher, last = target
    return (*(way * coefficient for coefficient in higher), 1 + way * (last - 1))
