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
    """What a runtime and PyTorch say to the same rows: logits [rows, outputs], entropies of any one shape."""

    logits: Floats
    expected_logits: Floats
    entropy: Floats
    expected_entropy: Floats


@dataclass(frozen=True)
class Comparison:
    """One case on one runtime, against PyTorch.

    `logits_error` is max |difference| / max |PyTorch logit|; `entropy_error` is in nats, over all layers and heads.
    """

    runtime: str
    case: str
    rows: int
    logits_error: float
    entropy_error: float
    same_greedy: int

    @property
    def passed(self) -> bool:
        """Both errors are within their tolerance (a nan is not)."""
        return self.logits_error <= LOGITS_TOLERANCE and self.entropy_error <= ENTROPY_TOLERANCE


def compare(runtime: str, case: str, pairs: Sequence[Pair]) -> Comparison:
    """The largest differences of all pairs of a case."""
    # numpy's maximum and not Python's, which drops a nan that is not the first.
    largest = float(np.max([np.abs(pair.expected_logits).max() for pair in pairs]))
    return Comparison(
        runtime=runtime,
        case=case,
        rows=sum(len(pair.logits) for pair in pairs),
        logits_error=float(np.max([np.abs(pair.logits - pair.expected_logits).max() for pair in pairs])) / largest,
        entropy_error=float(np.max([np.abs(pair.entropy - pair.expected_entropy).max() for pair in pairs])),
        same_greedy=sum(int((pair.logits.argmax(-1) == pair.expected_logits.argmax(-1)).sum()) for pair in pairs),
    )
