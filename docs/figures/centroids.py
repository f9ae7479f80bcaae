"""Writes `centroids.svg`: the mean position that a head attends to, by positional encoding, under entmax 1.5.

`python docs/figures/centroids.py`. Figure 8 of "Long-Context Generalization with Sparse Attention", with the random
logits of its Eq. 131 and 128 tokens. The paper does not say how RoPE changes logits that have no query and no key: here
head h's are multiplied by cos(g (i - j)) with g the h-th of 8 RoPE frequencies, as in its Appendix E.3.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from sharp.plugins.op.torch_normalizers import attention_weights

TOKENS, HEADS = 128, 8
LOW, HIGH, NOISE = -5.0, 5.0, 0.5


def random_logits(generator: torch.Generator) -> Tensor:
    """Content, a mild preference for near tokens, and noise [heads, queries, keys]."""
    shape = (HEADS, TOKENS, TOKENS)
    base = LOW + (HIGH - LOW) * torch.rand(shape, generator=generator)
    position = torch.arange(1, TOKENS + 1)
    share = (position[None, :] - position[:, None]).abs() / position[:, None]  # |j - i| / i
    return base + 0.2 * (HIGH - LOW) * (1 - 0.5 * share) + NOISE * torch.randn(shape, generator=generator)


def centroids(logits: Tensor) -> Tensor:
    """The mean position of every query's keys [heads, queries]."""
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    weights = attention_weights("entmax", logits[None], visible, alpha=1.5)[0]
    return weights @ torch.arange(1.0, TOKENS + 1)


def main() -> None:
    """Plot every head."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    logits = random_logits(torch.Generator().manual_seed(0))
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None, :]
    head = torch.arange(HEADS)[:, None, None]
    found = {
        "NoPE": centroids(logits),
        "ALiBi, slope 1 / h": centroids(logits - distance / (head + 1)),
        "RoPE": centroids(logits * torch.cos(10_000.0 ** (-head / HEADS) * distance)),
    }
    figure, axes = plt.subplots(2, 4, figsize=(9, 4.4), layout="constrained", sharex=True, sharey=True)
    for index, one in enumerate(axes.flat):
        one.plot([1, TOKENS], [1, TOKENS], "--", color="0.6", linewidth=1)
        for name, rows in found.items():
            one.plot(range(1, TOKENS + 1), rows[index], linewidth=1, label=None if index else name)
        one.set_title(f"head {index + 1}", fontsize="small")
        one.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("query i", fontsize="medium")
    figure.supylabel("centroid of its weights", fontsize="medium")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(Path(__file__).with_name("centroids.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
