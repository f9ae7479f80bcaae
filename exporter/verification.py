"""Does the model folder compute what PyTorch computes? One case on one runtime, compared."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Target

Floats = NDArray[np.float32]

# Relative to the largest logit: float32 sums in another order differ by some 1e-6 a layer.
LOGITS_TOLERANCE = 1e-4
ENTROPY_TOLERANCE = 1e-3  # nats
# What a folder is run with, by its target: Sharp's library, and ONNX Runtime alone, which inlines the function body. In
# a portable model the body is inlined already.
RUNTIMES: dict[Target, tuple[tuple[str, bool], ...]] = {
    "onnxruntime": (("kernels", True), ("inlined", False)),
    "portable": (("inlined", False),),
}


@dataclass(frozen=True)
class Pair:
    """What a runtime and PyTorch say to the same rows: logits [rows, outputs], entropies [layers, ...]."""

    logits: Floats
    expected_logits: Floats
    entropy: Floats
    expected_entropy: Floats


@dataclass(frozen=True)
class Comparison:
    """One case on one runtime, against PyTorch.

    `logits_error` is max |difference| / max |PyTorch logit|, `mean_logits_error` the mean of that; `entropy_error` and
    its mean are in nats, over all layers and heads, and `layer_entropy_errors` has the largest one of every layer.
    """

    runtime: str
    case: str
    rows: int
    logits_error: float
    entropy_error: float
    same_greedy: int
    mean_logits_error: float
    mean_entropy_error: float
    layer_entropy_errors: tuple[float, ...]

    @property
    def passed(self) -> bool:
        """Both errors are within their tolerance (a nan is not)."""
        return self.logits_error <= LOGITS_TOLERANCE and self.entropy_error <= ENTROPY_TOLERANCE

    @property
    def first_wrong_layer(self) -> int | None:
        """The first layer whose attention differs; None where all attend alike."""
        wrong = (layer for layer, error in enumerate(self.layer_entropy_errors) if not error <= ENTROPY_TOLERANCE)
        return next(wrong, None)


def compare(runtime: str, case: str, pairs: Sequence[Pair]) -> Comparison:
    """The differences of all pairs of a case."""
    # numpy's maximum and not Python's, which drops a nan that is not the first.
    logits = np.concatenate([np.abs(pair.logits - pair.expected_logits).ravel() for pair in pairs])
    entropies = np.concatenate(  # [layers, everything else]
        [np.abs(pair.entropy - pair.expected_entropy).reshape(len(pair.entropy), -1) for pair in pairs], axis=1
    )
    largest = float(np.max([np.abs(pair.expected_logits).max() for pair in pairs]))
    return Comparison(
        runtime=runtime,
        case=case,
        rows=sum(len(pair.logits) for pair in pairs),
        logits_error=float(logits.max()) / largest,
        entropy_error=float(entropies.max()),
        same_greedy=sum(int((pair.logits.argmax(-1) == pair.expected_logits.argmax(-1)).sum()) for pair in pairs),
        mean_logits_error=float(logits.mean(dtype=np.float64)) / largest,
        mean_entropy_error=float(entropies.mean(dtype=np.float64)),
        layer_entropy_errors=tuple(entropies.max(axis=1).tolist()),
    )
