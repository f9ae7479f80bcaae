"""Writes the pictures of the pages about norms: `python docs/norms/plots.py`.

Left, one relevant key (logit 6) among more and more standard normal ones, mean of 20 random rows; right, the weights of
one row of 40 such keys, sorted. Both are the float64 reference's, beside softmax in grey.
"""

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from sharp.plugins.op.normalizers import Normalizer, normalize

LENGTHS = np.unique(np.geomspace(16, 32768, 12).astype(int))
LOGIT, ROWS, KEYS = 6.0, 20, 40
COLORS = ("0.6", "C0", "C2", "C3", "C4")
Row = NDArray[np.float64]
Weigh = Callable[[Row], Row]


def plain(name: str, **options: float) -> Weigh:
    """Return the function from a row of logits to the weights of a normalizer."""
    normalizer = Normalizer(name, **options)
    return lambda logits: normalize(logits, normalizer)[0]


def scaled(name: str, factor: Callable[[float], float]) -> Weigh:
    """Return the function from logits to weights of a normalizer that scales them by `factor(L)`, L = ln(n + 1)."""
    normalizer = Normalizer(name)
    return lambda logits: normalize(logits * factor(np.log(len(logits) + 1)), normalizer)[0]


def with_params(name: str, *head_params: float) -> Weigh:
    """Return the function from logits to weights of a normalizer with these columns of `head_params`."""
    normalizer = Normalizer(name)
    return lambda logits: normalize(logits, normalizer, head_params)[0]


PICTURES: dict[str, dict[str, Weigh]] = {
    "adaptive-temperature": {"adaptive temperature": plain("adaptive_softmax")},
    "entmax": {"entmax 1.5": plain("entmax", alpha=1.5), "sparsemax": plain("entmax", alpha=2.0)},
    "length-scales": {
        "ssmax, s = 0.25": scaled("softmax", lambda length: 0.25 * length),
        "asentmax, 1 + 0.1 L": scaled("entmax", lambda length: 1 + 0.1 * length),
    },
    "ssa": {"b = 1, n = 1.5": with_params("ssa", 1, 1.5), "b = 1, n = 2.5": with_params("ssa", 1, 2.5)},
    "pointwise": {
        "sigmoid": plain("sigmoid"),
        "sigmoid-n": with_params("sigmoid", 0.0, 1.0),
        "relu": plain("relu"),
        "relu2": plain("relu2"),
    },
    "softpick": {"softpick": plain("softpick"), "entmax 1.5": plain("entmax", alpha=1.5)},
}


def picture(weighs: dict[str, Weigh]) -> plt.Figure:
    """Both panels."""
    random = np.random.default_rng(1)
    rows = {length: [random.normal(size=length) for _ in range(ROWS)] for length in (*LENGTHS.tolist(), KEYS)}
    for row in chain.from_iterable(rows.values()):
        row[0] = LOGIT
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
    for (label, weigh), color in zip({"softmax": plain("softmax"), **weighs}.items(), COLORS, strict=False):
        shares = [np.mean([share(weigh(row))[0] for row in rows[length]]) for length in LENGTHS.tolist()]
        left.semilogx(LENGTHS, shares, label=label, color=color)
        right.plot(range(1, KEYS + 1), np.sort(share(weigh(rows[KEYS][0])))[::-1], ".-", label=label, color=color)
    left.set(xlabel="keys", ylabel="share of the relevant key", ylim=(0, 1.05))
    right.set(xlabel="keys, sorted", ylabel="share of the weights", yscale="symlog")
    right.set_yscale("symlog", linthresh=1e-4)
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def share(weights: Row) -> Row:
    """Return each weight as a share of the sum, because weights of pointwise norms do not sum to 1."""
    return weights / max(weights.sum(), 1e-30)


def main() -> None:
    """Write all of them."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    for name, weighs in PICTURES.items():
        picture(weighs).savefig(Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
