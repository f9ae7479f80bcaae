"""Writes `collapse.svg`: representational collapse, after Figures 3 (left) and 6 of the ASEntmax paper.

`python docs/figures/collapse.py`. Six layers of causal attention with identity projections and residuals, one channel:
n - 1 tokens b and a last one phi, and the same with the last one twice. How far apart the last tokens of the two
sequences are after the layers: under softmax the one more token is not seen any more when n grows.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from sharp.plugins.op.torch_normalizers import attention_weights

LENGTHS = tuple(2**power for power in range(7, 13))
ALPHAS = (1.0, 1.5, 1.75, 2.0)
LAYERS, LAST, CHUNK = 6, 1.2, 256


def mix(queries: Tensor, keys: Tensor, alpha: float, visible: Tensor) -> Tensor:
    """Attention with identity projections, a residual, and the division that stands for a LayerNorm; [queries]."""
    normalizer = "softmax" if alpha == 1 else "entmax"
    weights = attention_weights(normalizer, (queries[:, None] * keys)[None], visible, alpha=alpha)[0]
    return (queries + weights @ keys) / 2


def prefix_states(prefix: Tensor, alpha: float) -> list[Tensor]:
    """The tokens before the last, [tokens], at every layer; they see neither the last one nor its copy."""
    index, states = torch.arange(len(prefix)), [prefix]
    for _ in range(LAYERS - 1):
        now = states[-1]
        if (now == now[0]).all():  # a mean of equal values
            states.append(now)
            continue
        rows = [
            mix(now[chunk], now[: chunk[-1] + 1], alpha, index[: chunk[-1] + 1] <= chunk[:, None])
            for chunk in index.split(CHUNK)
        ]
        states.append(torch.cat(rows))
    return states


def last_token(states: list[Tensor], length: int, copies: int, alpha: float) -> Tensor:
    """The last token after all layers, behind the first `length` - 1 of the prefix; there are `copies` of it."""
    last = torch.full((copies,), LAST)
    for state in states:
        keys = torch.cat([state[: length - 1], last])
        visible = torch.arange(len(keys)) < length + torch.arange(copies)[:, None]
        last = mix(last, keys, alpha, visible)
    return last[-1]


def main() -> None:
    """Plot a constant and a random prefix."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
    generator = torch.Generator().manual_seed(0)
    prefixes = {
        "prefix 1, 1, 1, ...": torch.ones(LENGTHS[-1]),
        "prefix random in [0, 1]": torch.rand(LENGTHS[-1], generator=generator),
    }
    for one, (title, prefix) in zip(axes, prefixes.items(), strict=True):
        for alpha in ALPHAS:
            states = prefix_states(prefix, alpha)
            ends = [[last_token(states, length, copies, alpha) for copies in (1, 2)] for length in LENGTHS]
            differences = [(once - twice).abs().item() for once, twice in ends]
            one.loglog(LENGTHS, differences, "o-", label="softmax" if alpha == 1 else f"entmax {alpha:g}")
        one.set(xlabel="tokens", title=title, xticks=LENGTHS, xticklabels=LENGTHS)
        one.minorticks_off()
        one.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("distance of the last tokens")
    axes[1].legend(frameon=False, fontsize="small")
    figure.savefig(Path(__file__).with_name("collapse.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
