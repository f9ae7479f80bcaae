"""Writes `theta.svg`: what a temperature theta does to weights and to their entropy.

`python docs/figures/theta.py`. Left, Figure 5 of "Softmax is not Enough": the entropy of softmax(a / theta) for the ten
logits a_i = lambda^i. Right, Figure 2 of "Long-Context Generalization with Sparse Attention": the weights of
entmax(z / theta) for z = 2.0, 1.8, 1.6, 1.4, 1.2 and three alphas.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from sharp.plugins.op.normalizers import Normalizer, normalize

POINTS, ELEMENTS = 81, 10
LOGITS = np.array([2.0, 1.8, 1.6, 1.4, 1.2])
INVERSES = np.linspace(0, 8, 161)
ALPHAS = (1.0, 1.5, 2.0)


def main() -> None:
    """Plot both."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    softmax = Normalizer("softmax")
    figure, (left, *right) = plt.subplots(1, 4, figsize=(12, 3), layout="constrained", width_ratios=(1.4, 1, 1, 1))
    bases, thetas = np.linspace(0, 1, POINTS), np.geomspace(0.01, 10, POINTS)
    series = bases[:, None] ** np.arange(1, ELEMENTS + 1)
    entropies = [[normalize(row / theta, softmax)[1].entropy for row in series] for theta in thetas]
    image = left.pcolormesh(bases, thetas, np.array(entropies), vmin=0, cmap="viridis", rasterized=True)
    left.set(xlabel="λ", ylabel="θ", yscale="log", title="softmax(λ^i / θ)")
    figure.colorbar(image, ax=left, label="entropy, nats")
    for axes, alpha in zip(right, ALPHAS, strict=True):
        normalizer = softmax if alpha == 1 else Normalizer("entmax", alpha=alpha)
        weights = np.array([normalize(LOGITS * inverse, normalizer)[0] for inverse in INVERSES])
        for index, logit in enumerate(LOGITS):
            axes.plot(INVERSES, weights[:, index], label=f"z = {logit}")
            if (zero := np.flatnonzero(weights[:, index] == 0)).size:
                axes.axvline(INVERSES[zero[0]], color=f"C{index}", linestyle=":", linewidth=1)
        axes.set(xlabel="1 / θ", ylim=(0, 1.02), title="softmax" if alpha == 1 else f"entmax {alpha:g}")
        axes.spines[["top", "right"]].set_visible(False)
    right[0].set_ylabel("weight")
    right[0].legend(frameon=False, fontsize="small")
    figure.savefig(Path(__file__).with_name("theta.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
