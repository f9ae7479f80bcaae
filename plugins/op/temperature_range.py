"""The range of an adaptive temperature: above some entropy its polynomial is below 1, and rows stay as they are."""

import math
from collections.abc import Sequence

import numpy as np

from sharp.core.manifest import Manifest


def largest_sharpened(coefficients: Sequence[float]) -> float:
    """Return the entropy H in nats above which max(poly(H), 1) is 1; infinite if the polynomial stays above 1 for ever.

    `coefficients` are those of poly, highest power first. The result is 0 if the polynomial is nowhere above 1. With
    the coefficients of ICML 2025 it is 5.94 nats, the entropy of 381 keys of equal weight; with the coefficients of
    2024 it is 4.59 nats, the entropy of 98 such keys.
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
    """Return a sentence of warning if a model's adaptive temperature does not reach the entropies of its context.

    Return None if the temperature reaches them, and for all other normalizers.
    """
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
