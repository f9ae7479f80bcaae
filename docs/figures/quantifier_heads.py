"""Writes `quantifier-heads.png`: what the last number of a sequence of task "every" attends to, as numbers grow.

`python docs/figures/quantifier_heads.py SOFTMAX SSA`, two checkpoints of `python -m sharp.models.train every`; after
Figure 2 of the SSA paper. docs/figures.md has the commands. The sequence is x_1, y_1, ..., x_n with numbers from
N(0, 1), of which the fifth is negative; the last one, the query, is 0.5, 5 or 70. Shown is what every head of
the last layer gives to each token.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from sharp.models.attention import EagerAttention
from sharp.models.checkpoint import read_checkpoint
from sharp.models.number_sequence import SharpForNumbers
from sharp.models.tasks.in_context import interleave

NUMBERS, LAST = 12, (0.5, 5.0, 70.0)


def sequence(last: float) -> Tensor:
    """Numbers and whether all so far are positive [1, 2 NUMBERS - 1]; the fifth is the first that is not."""
    numbers = torch.randn(1, NUMBERS, generator=torch.Generator().manual_seed(2)).abs()
    numbers[0, 4], numbers[0, -1] = -1.0, last
    return interleave(numbers, 2.0 * (numbers > 0).long().cummin(1).values - 1)


@torch.no_grad()
def main() -> None:
    """A row of maps for every checkpoint."""
    paths = [Path(argument) for argument in sys.argv[1:]]
    figure, axes = plt.subplots(
        len(paths), len(LAST), figsize=(9, 1.3 * len(paths) + 1), layout="constrained", squeeze=False
    )
    for row, path in zip(axes, paths, strict=True):
        model = read_checkpoint(path).model.eval()
        assert isinstance(model, SharpForNumbers)
        for one, last in zip(row, LAST, strict=True):
            tokens, attention = sequence(last), EagerAttention(model.config, record=True)
            said = model(tokens, attention=attention)[0, -1].softmax(-1)[1]
            image = one.imshow(attention.weights[-1][0, :, -1], vmin=0, vmax=1, cmap="viridis", aspect="auto")
            labels = [f"{x:.2g}" for x in tokens[0].tolist()]
            one.set_xticks(range(len(labels)), labels, fontsize=5.5, rotation=90)
            one.set_yticks(range(model.config.q_heads))
            one.set_title(f"last number {last:g}: P(every) = {said:.2f}", fontsize="small")
        row[0].set_ylabel(f"{model.config.norm}\nhead")
    figure.colorbar(image, ax=axes, shrink=0.7, label="weight")
    figure.savefig(Path(__file__).with_name("quantifier-heads.png"), dpi=110)


if __name__ == "__main__":
    main()
