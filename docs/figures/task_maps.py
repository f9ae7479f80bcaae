"""Writes `2back-maps.png` and `local-count-maps.png`: attention of small models of the two tasks.

`python docs/figures/task_maps.py`, after Figures 11 and 12 of "Long-Context Generalization with Sparse Attention".
2Back: the last layer, the last 32 queries and keys of a sequence of the longest trained length, and of one 8 times as
long; nope are models without positions, as the paper's. Local Count: the paper's sequence of clusters, first and last
layer. Of NAPE's heads the first half has ALiBi, the others no position.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from sharp.models.attention import EagerAttention
from sharp.models.checkpoint import load_checkpoint
from sharp.models.tasks.memory import TwoBack

FOLDER = Path(__file__).parents[2] / "models" / "checkpoints" / "small"
NORMS = ("softmax", "asentmax")
LENGTHS, SHOWN = (64, 512), 32
CLUSTERS = ((1, 10), (2, 4), (3, 10), (2, 4), (4, 10), (2, 4))  # word, times


@torch.no_grad()
def weights(path: Path, tokens: Tensor) -> list[Tensor]:
    """Return the attention weights of every layer of a model for one sequence, [heads, queries, keys] each."""
    model = load_checkpoint(path)
    attention = EagerAttention(model.config, record=True)
    model(tokens[None], attention=attention)
    return [layer[0] for layer in attention.weights]


def draw(rows: list[tuple[str, list[tuple[str, Tensor]]]], file: str) -> None:
    """A row of maps for every name; a map's color is its weight to the power 1/2, so that weak ones are seen."""
    columns = len(rows[0][1])
    size = (9, 9 / columns * len(rows) + 0.4)
    figure, axes = plt.subplots(len(rows), columns, figsize=size, layout="compressed", squeeze=False)
    for row, (name, maps) in zip(axes, rows, strict=True):
        for one, (title, cells) in zip(row, maps, strict=True):
            image = one.imshow(cells.sqrt(), vmin=0, vmax=1, cmap="viridis")
            one.set(xticks=[], yticks=[])
            one.set_title(title, fontsize="small")
        row[0].set_ylabel(name)
    figure.colorbar(image, ax=axes, shrink=0.6, label="√ weight")
    figure.savefig(Path(__file__).with_name(file), dpi=110)


def two_back() -> None:
    """Norms and positions down, lengths and heads across."""
    rows = []
    for norm in (*NORMS, *(f"{norm}-nope" for norm in NORMS)):
        maps = []
        for length in LENGTHS:
            (tokens,) = TwoBack().sample(1, length, torch.Generator().manual_seed(0)).inputs
            heads = weights(FOLDER / f"2back-{norm}.safetensors", tokens[0])[-1]
            maps += [
                (f"{length} tokens\nhead {head}", cells[-SHOWN:, -SHOWN:]) for head, cells in enumerate(heads, start=1)
            ]
        rows.append((norm.replace("-", ",\n"), maps))
    draw(rows, "2back-maps.png")


def local_count() -> None:
    """Norms down, layers and heads across."""
    tokens = torch.tensor([word for word, times in CLUSTERS for _ in range(times)])
    rows = []
    for norm in NORMS:
        layers = weights(FOLDER / f"local-count-{norm}.safetensors", tokens)
        maps = [
            (f"layer {layer + 1}\nhead {head}", cells)
            for layer in (0, len(layers) - 1)
            for head, cells in enumerate(layers[layer], start=1)
        ]
        rows.append((norm, maps))
    draw(rows, "local-count-maps.png")


if __name__ == "__main__":
    two_back()
    local_count()
