"""The allowed difference between log-probabilities of one model in two programs, by their precision."""

from dataclasses import dataclass

from sharp.core.manifest import Manifest

# Mean absolute differences of log-probabilities, in nats. On 2026-11-28 a model of two layers differed from
# transformers by 3e-6 on average and 2e-5 at most, and SmolLM2-135M in Q4_1, whose activations llama.cpp rounds to
# 8 bits unless it copies the weights to float32, from llama.cpp by 0.084 and 0.95.
TOLERANCES = {"float32": 0.001, "16 bits": 0.02, "8 bits": 0.15, "4 bits": 0.3}
LARGEST = 20  # times the tolerance: the limit for the difference of a single log-probability
TIE = 5  # times the tolerance: the difference of two tokens up to which either may be generated


@dataclass(frozen=True)
class Tolerance:
    """The allowed differences between two programs.

    Attributes:
        mean: limit for the mean of the absolute differences of all log-probabilities, in nats.
        precision: the lower precision of the two programs, from which `mean` follows; empty if the user chose `mean`.
    """

    mean: float
    precision: str = ""

    @property
    def largest(self) -> float:
        """The limit for the difference of a single log-probability, in nats."""
        return LARGEST * self.mean

    @property
    def tie(self) -> float:
        """The difference of two tokens' log-probabilities up to which either may be the likeliest, in nats."""
        return TIE * self.mean


def folder_precision(manifest: Manifest) -> str:
    """Return the precision that a model folder computes in, as a name of `TOLERANCES`."""
    if (manifest.quantization or "").startswith("int4"):
        return "4 bits"
    if manifest.quantization is not None or manifest.cache.dtype in ("int8", "fp8"):
        return "8 bits"
    return "float32" if manifest.dtype == manifest.cache.dtype == "float32" else "16 bits"


def tolerance_of(*precisions: str) -> Tolerance:
    """Return the tolerance for programs of these precisions, which is that of the lowest precision."""
    lowest = max(precisions, key=list(TOLERANCES).index)
    return Tolerance(TOLERANCES[lowest], lowest)
