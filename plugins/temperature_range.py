"""How far an adaptive temperature reaches: beyond some entropy its polynomial is below 1, and rows stay as they are."""

import math
from collections.abc import Sequence

import numpy as np

from sharp.plugins.manifest import Manifest


def largest_sharpened(coefficients: Sequence[float]) -> float:
    """The entropy in nats beyond which max(poly(H), 1) is 1; infinite where the polynomial rises for ever.

    5.94 nats, as of 381 keys of equal weight, with the coefficients of ICML 2025; 4.59, as of 98, with those of 2024.
    """
    polynomial = np.trim_zeros(np.array(coefficients, np.float64), "f")
    if len(polynomial) == 0:
        return 0.0
    if len(polynomial) == 1:
        return math.inf if polynomial[0] > 1 else 0.0
    if polynomial[0] > 0:
        return math.inf
    polynomial[-1] -= 1.0
    roots = np.roots(polynomial)
    real = roots[np.abs(roots.imag) < 1e-6 * np.maximum(1.0, np.abs(roots))].real
    return max(0.0, float(real.max(initial=0.0)))


def short_of_context(manifest: Manifest) -> str | None:
    """One sentence where the adaptive temperature of a model does not reach the entropies of its context."""
    norm = manifest.norm
    if norm.normalizer != "adaptive_softmax":
        return None
    reach = largest_sharpened(norm.temperature_coefficients)
    if math.log(manifest.max_context) <= reach:
        return None
    return (
        f"{manifest.name}: its adaptive temperature does nothing beyond an entropy of {reach:.2f} nats, which "
        f"{math.floor(math.exp(reach)):,} keys of equal weight have, and its context is {manifest.max_context:,} "
        "tokens; fit it to longer texts with sharp fit-temperature, and export with --temperature-coefficients"
    )
