"""Writes `boundaries.svg`: what the models of linear functions say far outside of the numbers they were trained on.

`python docs/figures/boundaries.py`, after Figure 9 of the SSA paper, of the small models in models/checkpoints. The 39
points of a sequence are from N(0, 1), as in training, and the 40th is x: at f(x) = x for large x, and at f(x) = 10 x
for small ones. A line is the mean over sequences, the band one standard deviation.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from sharp.models.checkpoint import read_checkpoint
from sharp.models.number_sequence import SharpForNumbers
from sharp.models.tasks.in_context import interleave

CHECKPOINTS = Path(__file__).parents[2] / "models" / "checkpoints"
NORMS = ("softmax", "ssa")
PANELS = ((1.0, 100.0), (10.0, 3.0), (10.0, 100.0))  # slope, largest |x|
SEQUENCES, POINTS, STEPS = 16, 40, 41


@torch.no_grad()
def predictions(model: SharpForNumbers, slope: float, xs: Tensor) -> Tensor:
    """Return the model's outputs at every x, [x, sequences]."""
    shown = torch.randn(SEQUENCES, POINTS, generator=torch.Generator().manual_seed(0))
    rows = []
    for x in xs:
        points = shown.clone()
        points[:, -1] = x
        rows.append(model(interleave(points, slope * points))[:, -1, 0])
    return torch.stack(rows)


def main() -> None:
    """Plot each panel's two models and the function."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9, 3), layout="constrained")
    models = {
        norm: read_checkpoint(CHECKPOINTS / f"linear-functions-{norm}.safetensors").model.eval() for norm in NORMS
    }
    for one, (slope, largest) in zip(axes, PANELS, strict=True):
        xs = torch.linspace(-largest, largest, STEPS)
        one.plot(xs, slope * xs, "--", color="0.6", linewidth=1, label="f(x)")
        ends = 0.0
        for norm, model in models.items():
            assert isinstance(model, SharpForNumbers)
            said = predictions(model, slope, xs)
            mean, deviation = said.mean(1), said.std(1)
            one.plot(xs, mean, label=norm)
            one.fill_between(xs, mean - deviation, mean + deviation, alpha=0.2)
            ends = max(ends, (mean.abs() + deviation).max().item())
        one.set(title=f"f(x) = {slope:g} x", xlabel="x", ylim=(-1.6 * ends, 1.6 * ends))
        one.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("prediction")
    axes[0].legend(frameon=False)
    figure.savefig(Path(__file__).with_name("boundaries.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
