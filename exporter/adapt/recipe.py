"""How a run of distillation trains: its steps, learning rates and batches, and the path from softmax to the norm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FIRST_ALPHA = 1.05  # of entmax on the path from softmax


@dataclass(frozen=True)
class Recipe:
    """How to train; a run is resumed only with the recipe that it was started with.

    `long_steps` of the `steps` read `long_batch` sequences of `long_length` tokens, the others `batch` of `length`.
    The long ones are spread evenly: at the end, where the learning rate is nearly 0, they would teach nothing. All
    processes together read a batch.
    """

    steps: int
    length: int
    batch: int
    long_steps: int = 0
    long_length: int = 0
    long_batch: int = 1
    seed: int = 0
    path: bool = True  # entmax is reached from softmax, not there from the first step
    adapter_rate: float = 1e-3
    norm_rate: float = 2e-2
    warmup: int = 10
    clip: float = 1.0
    dtype: str = "float32"  # of matrix products; parameters, attention and what is measured are float32

    def shape_at(self, step: int) -> tuple[int, int]:
        """Sequences and tokens of a step."""
        before, after = (count * self.long_steps // self.steps for count in (step, step + 1))
        return (self.long_batch, self.long_length) if after > before else (self.batch, self.length)

    def rate_at(self, step: int) -> float:
        """The share of the learning rates: a linear warm-up times half a cosine."""
        return min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        short = (self.steps - self.long_steps) * self.length * self.batch
        return short + self.long_steps * self.long_length * self.long_batch


def fastest_dtype(device: torch.device) -> str:
    """Bfloat16 where an x86 processor or a GPU is known to have instructions for it; float32 is faster without."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bfloat16" if found.get("avx512_bf16") or found.get("amx_bf16") else "float32"


def batch_at(recipe: Recipe, tokens: Tensor, step: int) -> Tensor:
    """The sequences int64 [batch, length] of a step: they depend on seed and step alone."""
    batch, length = recipe.shape_at(step)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - length + 1, (batch,), generator=generator).tolist()
    return torch.stack([tokens[start : start + length] for start in starts])


def alpha_at(share: float, target: float) -> float:
    """Entmax's alpha of a step before which this `share` of the run lies.

    It grows from near 1, where entmax is softmax, to its own in the middle of the run. After 100 steps on SmolLM2 the
    perplexity was 4 % below that of alpha 1.5 from the first step on (bench/results/adapt_walk_entmax.json).
    """
    return FIRST_ALPHA + (target - FIRST_ALPHA) * min(1.0, 2 * share)


def temperature_at(share: float, target: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of the adaptive temperature, highest power first, of a step before which this `share` lies.

    With p for the polynomial of the norm, that of the step is 1 + w (p - 1), where w grows from 0 to 1 in the first
    half of the run: softmax first. For modules, whose queries have no factor that could start at 1 / p.
    """
    way = min(1.0, 2 * share)
    *higher, last = target
    return (*(way * one for one in higher), 1 + way * (last - 1))
