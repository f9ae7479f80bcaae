"""Writes `squashing.svg`: how much of the gradient reaches a token, by its distance, in the demo's language models.

`python docs/figures/squashing.py`. The gradient of the last token's cross entropy by the embedding of every earlier
one: its norm by distance (left), and its norm at the input of every layer (right, after Figures 3 and 7 of
"Long-Context Generalization with Sparse Attention", which train others). Means over windows of the held-out text.
"""

from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sharp.models.bits_per_byte import read_text
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import load_checkpoint

CHECKPOINTS = Path(__file__).parents[2] / "models" / "checkpoints"
NORMS = ("softmax", "ssa", "asentmax")
TOKENS, WINDOWS, BINS = 512, 8, 16


def gradients(model: SharpForCausalLM, window: Tensor) -> list[Tensor]:
    """Norms [tokens] of the gradient at the input of every layer."""
    inputs: list[Tensor] = []

    def keep(_module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        arguments[0].retain_grad()
        inputs.append(arguments[0])

    hooks = [block.register_forward_pre_hook(keep) for block in model.blocks]
    logits = model(window[None, :-1])
    functional.cross_entropy(logits[0, -1:].float(), window[-1:]).backward()
    for hook in hooks:
        hook.remove()
    return [hidden.grad[0].norm(dim=-1) for hidden in inputs if hidden.grad is not None]


def main() -> None:
    """Plot all of them."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    text = read_text(None).long()
    starts = torch.linspace(0, len(text) - TOKENS - 2, WINDOWS).long()
    edges = np.unique(np.geomspace(1, TOKENS, BINS).astype(int))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for norm in NORMS:
        model = load_checkpoint(CHECKPOINTS / f"text-{norm}.safetensors").eval()
        found = torch.stack([torch.stack(gradients(model, text[start : start + TOKENS + 1])) for start in starts])
        mean = found.mean(0).numpy()  # [layers, tokens]
        by_distance = mean[0, ::-1]
        means = [by_distance[low:high].mean() for low, high in pairwise(edges)]
        left.loglog(edges[:-1], means, label=norm)
        right.semilogy(range(len(mean)), mean[:, : TOKENS // 2].mean(-1), "o-", label=norm)
    left.set(xlabel="distance from the last token", ylabel="norm of the gradient")
    right.set(xlabel="layer", title=f"tokens over {TOKENS // 2} away", xticks=range(len(mean)))
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("squashing.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
