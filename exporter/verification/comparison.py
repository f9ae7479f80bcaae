"""Does the model folder compute what PyTorch computes? One case on one runtime, compared."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Cache, Target

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


class Runtime(NamedTuple):
    """What a folder is run with: Sharp's library, or ONNX Runtime alone, which inlines the function body."""

    name: str
    kernels: bool


KERNELS, INLINED = Runtime("kernels", True), Runtime("inlined", False)
WIDENED = "in float32"  # behind the name of a runtime that had a bfloat16 model's copy in float32


def runtimes_of(target: Target, cache: Cache) -> tuple[Runtime, ...]:
    """The runtimes that a folder is verified in; a portable model's body is inlined already."""
    if target == "portable":
        return (INLINED,)
    # There is no body for auxiliary cache tensors.
    return (KERNELS,) if cache.beside or target == "tensorrt" else (KERNELS, INLINED)


@dataclass(frozen=True)
class Difference:
    """The largest of logits, relative to the largest logit of the case, and of entropies, in nats; and their means.

    `cached` is of a key or value in a cache, relative to the largest there.
    """

    logits: float
    entropy: float
    cached: float
    mean_logits: float = math.inf
    mean_entropy: float = math.inf


# Float32 sums in another order differ by some 1e-6 a layer.
FLOAT32 = Difference(logits=1e-4, entropy=1e-3, cached=1e-4)


@dataclass(frozen=True)
class Shape:
    """One sequence of a case: its tokens of the last step, and those of the steps before it."""

    tokens: int
    context: int = 0

    def within(self, most: int) -> "Shape":
        """As much of it as a model has positions for."""
        tokens = min(self.tokens, most)
        return Shape(tokens, min(self.context, most - tokens))


@dataclass(frozen=True)
class CaseOutputs:
    """What a model says to one sequence: logits [rows, outputs], entropies [layers, rows, q_heads].

    `keys` and `values` are what every cache then holds, each [tokens, kv_heads, dim]; empty in the form without one.
    """

    logits: Floats | Doubles
    entropy: Floats | Doubles
    keys: tuple[Floats | Doubles, ...] = ()
    values: tuple[Floats | Doubles, ...] = ()


@dataclass(frozen=True)
class HeadEntropies:
    """Sums over the rows of a case, and the largest difference, per head: each [layers, q_heads], in nats."""

    rows: int
    expected: Doubles
    actual: Doubles
    error: Doubles


class Error(NamedTuple):
    """Of all tensors of a kind: the largest difference and the mean, relative to the largest number of each tensor."""

    largest: float
    mean: float


@dataclass(frozen=True)
class Comparison:
    """One case on one runtime, against PyTorch.

    `logits_error` is max |difference| / max |PyTorch logit|, `mean_logits_error` the mean of that; `entropy_error` and
    its mean are in nats, over all layers and heads. `cached` has the errors of keys and values in the caches.
    `tolerance` is what errors may be; means of what is cached may differ as those of logits. `rounding` is there where
    the reference is PyTorch in float64: what PyTorch in float32 differs from it by. A layer whose entropies differ by
    more than its `layer_tolerances` attends to something else.
    """

    runtime: str
    case: str
    rows: int
    logits_error: float
    entropy_error: float
    same_greedy: int
    mean_logits_error: float
    mean_entropy_error: float
    heads: HeadEntropies
    cached: Mapping[str, Error]
    tolerance: Difference
    layer_tolerances: tuple[float, ...]
    rounding: Difference | None = None

    @property
    def passed(self) -> bool:
        """The errors are within their tolerance (a nan is not)."""
        allowed = self.tolerance
        return (
            self.logits_error <= allowed.logits
            and self.entropy_error <= allowed.entropy
            and self.mean_logits_error <= allowed.mean_logits
            and self.mean_entropy_error <= allowed.mean_entropy
            and all(one.largest <= allowed.cached and one.mean <= allowed.mean_logits for one in self.cached.values())
        )

    @property
    def difference(self) -> str:
        """What differs where, for a message."""
        allowed = self.tolerance
        said = (
            f"{self.case!r} ({self.runtime}): logits by {self.logits_error:.1e} ({allowed.logits:.1e} allowed), "
            f"entropy by {self.entropy_error:.1e} ({allowed.entropy:.1e} allowed)"
        )
        wrong = [
            f"{name} by {one.largest:.1e}" for name, one in self.cached.items() if not one.largest <= allowed.cached
        ]
        far = [f"{name} by {one.mean:.1e}" for name, one in self.cached.items() if not one.mean <= allowed.mean_logits]
        if wrong:
            said += f", cached {' and '.join(wrong)} ({allowed.cached:.1e} allowed)"
        if allowed.mean_logits == math.inf:
            return said
        if far:
            said += f", cached in the mean {' and '.join(far)} ({allowed.mean_logits:.1e} allowed)"
        return (
            f"{said}, their means by {self.mean_logits_error:.1e} ({allowed.mean_logits:.1e} allowed) and "
            f"{self.mean_entropy_error:.1e} ({allowed.mean_entropy:.1e} allowed)"
        )

    @property
    def layer_entropy_errors(self) -> tuple[float, ...]:
        """The largest error of every layer."""
        return tuple(self.heads.error.max(axis=1).tolist())

    @property
    def first_wrong_layer(self) -> int | None:
        """The first layer whose attention differs; None where all attend alike."""
        layers = enumerate(zip(self.layer_entropy_errors, self.layer_tolerances, strict=True))
        return next((layer for layer, (error, allowed) in layers if not error <= allowed), None)


def compare(
    runtime: str,
    case: str,
    computed: Sequence[CaseOutputs],
    expected: Sequence[CaseOutputs],
    tolerance: Difference = FLOAT32,
) -> Comparison:
    """The differences between `computed` and `expected`, what PyTorch says to the same sequences."""
    pairs = list(zip(computed, expected, strict=True))
    # numpy's maximum and not Python's, which drops a nan that is not the first.
    logits = np.concatenate([np.abs(found.logits - reference.logits).ravel() for found, reference in pairs])
    largest = float(np.max([np.abs(reference.logits).max() for reference in expected]))
    heads = _head_entropies(pairs)
    return Comparison(
        runtime=runtime,
        case=case,
        rows=heads.rows,
        logits_error=float(logits.max()) / largest,
        entropy_error=float(heads.error.max()),
        same_greedy=sum(int((one.logits.argmax(-1) == other.logits.argmax(-1)).sum()) for one, other in pairs),
        mean_logits_error=float(logits.mean(dtype=np.float64)) / largest,
        mean_entropy_error=float(np.mean(np.concatenate([np.abs(a.entropy - b.entropy).ravel() for a, b in pairs]))),
        heads=heads,
        cached=_cached_errors(pairs),
        tolerance=tolerance,
        layer_tolerances=(tolerance.entropy,) * len(heads.error),
    )


def _cached_errors(pairs: Sequence[tuple[CaseOutputs, CaseOutputs]]) -> dict[str, Error]:
    found: dict[str, Error] = {}
    for name in ("keys", "values"):
        caches = [
            (np.abs(actual - reference), np.abs(reference).max())
            for one, expected in pairs
            for actual, reference in zip(getattr(one, name), getattr(expected, name), strict=True)
        ]
        if caches:
            errors = np.concatenate([(difference / largest).ravel() for difference, largest in caches])
            found[name] = Error(float(errors.max()), float(errors.mean(dtype=np.float64)))
    return found


def _head_entropies(pairs: Sequence[tuple[CaseOutputs, CaseOutputs]]) -> HeadEntropies:
    actual = np.concatenate([found.entropy for found, _ in pairs], axis=1, dtype=np.float64)
    expected = np.concatenate([reference.entropy for _, reference in pairs], axis=1, dtype=np.float64)
    return HeadEntropies(
        rows=actual.shape[1],
        expected=expected.sum(axis=1),
        actual=actual.sum(axis=1),
        error=np.abs(actual - expected).max(axis=1),
    )
