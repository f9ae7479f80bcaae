"""Writes `scale-fits.svg`: the factors that the demo's ASEntmax model gives its queries, and three formulas for them.

`python docs/figures/scale_fits.py`, after Figure 4 of the ASEntmax paper, whose models learn a factor for every
position: the fits are 1 + beta n, 1 + beta ln n and 1 + beta (ln n)^gamma. A panel is one of the scaled heads; a point
is the mean over the tokens of a range of positions, of a text that was held out in training.
"""

from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sharp.models.bits_per_byte import read_text
from sharp.models.checkpoint import load_checkpoint
from sharp.models.query_scale import QueryScale

CHECKPOINT = Path(__file__).parents[2] / "models" / "checkpoints" / "text-asentmax.safetensors"
TOKENS, WINDOWS, BINS = 512, 4, 24
Doubles = NDArray[np.float64]


@torch.no_grad()
def factors() -> Doubles:
    """The mean factor over some windows [layers, scaled heads, tokens]."""
    model = load_checkpoint(CHECKPOINT).eval()
    text, found = read_text(None).long(), []

    def see(module: nn.Module, _inputs: tuple[Tensor, ...], factor: Tensor) -> None:
        assert isinstance(module, QueryScale)
        found.append(factor[0][:, list(module.scaled_heads)].T)

    for block in model.blocks:
        block.attention.query_scale.register_forward_hook(see)
    for start in torch.linspace(0, len(text) - TOKENS, WINDOWS).long():
        model(text[None, start : start + TOKENS])
    return torch.stack(found).unflatten(0, (WINDOWS, -1)).mean(0).double().numpy()


def fits(lengths: Doubles, values: Doubles) -> dict[str, Doubles]:
    """The least-squares fits of three formulas; gamma by trying many."""
    found = {}
    for name, basis in {"1 + β n": lengths, "1 + β ln n": np.log(lengths)}.items():
        found[name] = 1 + basis * (basis @ (values - 1)) / (basis @ basis)
    powers = [np.log(lengths) ** gamma for gamma in np.linspace(-4, 4, 161)]
    fitted = [1 + power * (power @ (values - 1)) / (power @ power) for power in powers]
    found["1 + β (ln n)^γ"] = min(fitted, key=lambda one: float(((one - values) ** 2).sum()))
    return found


def main() -> None:
    """Plot every scaled head."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    learned = factors()
    edges = np.unique(np.geomspace(2, TOKENS, BINS).astype(int))
    lengths = np.array([np.arange(low, high).mean() + 1 for low, high in pairwise(edges)])
    layers, heads, _ = learned.shape
    figure, axes = plt.subplots(
        layers, heads, figsize=(9, 1.7 * layers), layout="constrained", sharex=True, squeeze=False
    )
    for layer, head in np.ndindex(layers, heads):
        one, row = axes[layer, head], learned[layer, head]
        values = np.array([row[low:high].mean() for low, high in pairwise(edges)])
        one.semilogx(lengths, values, ".", color="0.4")
        for index, (name, fitted) in enumerate(fits(lengths, values).items()):
            share = 1 - ((values - fitted) ** 2).sum() / ((values - values.mean()) ** 2).sum()
            one.semilogx(lengths, fitted, color=f"C{index}", linewidth=1, label=None if layer or head else name)
            if index == 2:
                one.set_title(f"layer {layer}, head {head}, R² {share:.2f}", fontsize="x-small")
        one.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("position n", fontsize="medium")
    figure.supylabel("factor", fontsize="medium")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(Path(__file__).with_name("scale-fits.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
