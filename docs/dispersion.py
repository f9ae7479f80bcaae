"""Writes `dispersion.svg`: the weight of one relevant key among more and more others, under each normalizer.

`python docs/dispersion.py`. The others' logits are standard normal, the relevant key's is 6: the float64 reference's
weights, mean of 20 random rows.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from sharp.plugins.op.normalizers import Normalizer, normalize

LENGTHS = np.unique(np.geomspace(16, 131072, 14).astype(int))
LOGIT, ROWS = 6.0, 20


def weights(normalizer: Normalizer) -> list[float]:
    """The mean weight of the relevant key for every length."""
    random = np.random.default_rng(1)
    found = []
    for length in LENGTHS:
        logits = random.normal(size=(ROWS, length))
        logits[:, 0] = LOGIT
        found.append(float(np.mean([normalize(row, normalizer)[0][0] for row in logits])))
    return found


def main() -> None:
    """Plot all of them."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for normalizer, label, color in (
        (Normalizer("softmax"), "softmax", "tab:red"),
        (Normalizer("entmax", alpha=1.5), "entmax 1.5", "tab:blue"),
        (Normalizer("entmax", alpha=2), "sparsemax (entmax 2)", "tab:green"),
    ):
        axes.semilogx(LENGTHS, weights(normalizer), label=label, color=color)
    axes.set(xlabel="keys", ylabel="weight of the relevant key", ylim=(0, 1.05))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("dispersion.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
