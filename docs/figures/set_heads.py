"""Writes `set-heads.png`: the head of the max-retrieval models on 32 sets, Figures 2 and 7 of "Softmax is not Enough".

`python docs/figures/set_heads.py`. A row of a map is a set, its columns the 16 items with the largest priority, the
largest on the right; from left to right the sets grow. What a norm gives to other items is not in the map.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from sharp.models.checkpoint import read_checkpoint
from sharp.models.evaluation import with_adaptive_temperature, with_log_power
from sharp.models.max_retrieval import MaxRetrieval
from sharp.models.tasks.largest_item import LargestItem

CHECKPOINTS = Path(__file__).parents[2] / "models" / "checkpoints"
SIZES = (16, 64, 256, 1024, 4096, 16384)
SETS, SHOWN = 32, 16


def models() -> dict[str, MaxRetrieval]:
    """The models of seed 0; three are the one that was trained with softmax."""
    softmax, asentmax = (
        read_checkpoint(CHECKPOINTS / f"max-retrieval-{name}.safetensors").model.eval()
        for name in ("softmax", "asentmax")
    )
    assert isinstance(softmax, MaxRetrieval)
    assert isinstance(asentmax, MaxRetrieval)
    return {
        "softmax": softmax,
        "adaptive\ntemperature": with_adaptive_temperature(softmax),
        "log-power": with_log_power(softmax),
        "asentmax,\ntrained": asentmax,
    }


@torch.no_grad()
def main() -> None:
    """Plot all of them."""
    rows = models()
    figure, axes = plt.subplots(len(rows), len(SIZES), figsize=(9, 6.6), layout="constrained")
    for column, size in enumerate(SIZES):
        items, query = LargestItem().sample(SETS, size, torch.Generator().manual_seed(0)).inputs
        order = items[:, :, 0].argsort(1)[:, -SHOWN:]
        for row, (name, model) in enumerate(rows.items()):
            weights, _ = model.attention(items, query)
            one = axes[row, column]
            image = one.imshow(weights.gather(1, order), vmin=0, vmax=1, cmap="viridis", aspect="auto")
            one.set(xticks=[], yticks=[])
            if row == 0:
                one.set_title(f"{size:,} items", fontsize="medium")
            if column == 0:
                one.set_ylabel(name)
    figure.colorbar(image, ax=axes, shrink=0.6, label="weight")
    figure.savefig(Path(__file__).with_name("set-heads.png"), dpi=110)


if __name__ == "__main__":
    main()
