"""Writes `quantifiers.png`: errors on task "every" by length and spread of the numbers, as Figure 4 of the SSA paper.

`python docs/figures/quantifiers.py SOFTMAX SSA`, two checkpoints of `python -m sharp.models.train every`. Those of the
picture are tiny (2 layers of 64, 800 steps, minutes); docs/figures.md has the commands. The error is that of the last
answer, in sequences of which half stay open up to their last number.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from sharp.models.checkpoint import read_checkpoint
from sharp.models.tasks.in_context import Quantifier

LENGTHS = (10, 20, 40, 60, 80, 100, 150, 200)
SIGMAS = (1, 2, 5, 10, 15, 20, 30)
SAMPLES = 256


@torch.no_grad()
def errors(path: Path) -> list[list[float]]:
    """The share of the last outputs that are wrong, a row for every sigma."""
    model = read_checkpoint(path).model.eval()
    rows = []
    for sigma in SIGMAS:
        task, row = Quantifier("every", input_sigma=sigma, undecided=0.5), []
        for length in LENGTHS:
            batch = task.sample(SAMPLES, length, torch.Generator().manual_seed(1))
            said = model(*batch.inputs)[:, -1].argmax(-1)
            row.append(100 * (said != batch.targets[:, -1]).float().mean().item())
        rows.append(row)
    return rows


def main() -> None:
    """Plot a map for each checkpoint."""
    paths = [Path(argument) for argument in sys.argv[1:]]
    figure, axes = plt.subplots(1, len(paths), figsize=(9, 3.4), layout="constrained", squeeze=False)
    maps = [np.array(errors(path)) for path in paths]
    for one, path, cells in zip(axes[0], paths, maps, strict=True):
        image = one.imshow(
            cells, vmin=0, vmax=max(5.0, *(found.max() for found in maps)), origin="lower", aspect="auto"
        )
        one.set(title=path.stem, xlabel="numbers", xticks=range(len(LENGTHS)), xticklabels=LENGTHS)
        one.set(yticks=range(len(SIGMAS)), yticklabels=SIGMAS)
    axes[0, 0].set_ylabel("σ of the numbers")
    figure.colorbar(image, ax=axes, label="wrong outputs, %")
    figure.savefig(Path(__file__).with_name("quantifiers.png"), dpi=110)


if __name__ == "__main__":
    main()
