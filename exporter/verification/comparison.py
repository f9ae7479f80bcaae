"""The comparison of a model folder with PyTorch: one case in one runtime."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Cache, Target

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


class Runtime(NamedTuple):
    """A way to run a folder: with Sharp's library, or with ONNX Runtime alone, which inlines the function body."""

    name: str
    kernels: bool


KERNELS, INLINED = Runtime("kernels", True), Runtime("inlined", False)
WIDENED = "in float32"  # the end of the runtime's name if it ran the float32 copy of a bfloat16 model


def runtimes_of(target: Target, cache: Cache) -> tuple[Runtime, ...]:
    """Return the runtimes that a folder is verified in. A portable model has its body inlined already."""
    if target == "portable":
        return (INLINED,)
    # The function body does not support auxiliary cache tensors, and a model for TensorRT has no body.
    return (KERNELS,) if cache.beside or target == "tensorrt" else (KERNELS, INLINED)


@dataclass(frozen=True)
class Difference:
    """The largest and the mean differences of a case.

    Differences of logits are relative to the largest logit of the case, those of entropies are in nats. `cached` is the
    largest difference of a key or value in a cache, relative to the largest number of the cache.
    """

    logits: float
    entropy: float
    cached: float
    mean_logits: float = math.inf
    mean_entropy: float = math.inf


# Sums of float32 numbers in another order differ by some 1e-6 per layer.
FLOAT32 = Difference(logits=1e-4, entropy=1e-3, cached=1e-4)


@dataclass(frozen=True)
class CaseShape:
    """The size of one sequence of a case: `tokens` in the last step, `context` tokens in earlier steps."""

    tokens: int
    context: int = 0

    def within(self, most: int) -> "CaseShape":
        """Return this shape, shortened to at most `most` tokens, the number of positions of a model."""
        tokens = min(self.tokens, most)
        return CaseShape(tokens, min(self.context, most - tokens))


@dataclass(frozen=True)
class CaseOutputs:
    """The outputs of a model for one sequence: logits [rows, outputs], entropies [layers, rows, q_heads].

    `keys` and `values` have the content of every cache after the last step, each [tokens, kv_heads, dim]. They are
    empty in the form without a cache.
    """

    logits: Floats | Doubles
    entropy: Floats | Doubles
    keys: tuple[Floats | Doubles, ...] = ()
    values: tuple[Floats | Doubles, ...] = ()


@dataclass(frozen=True)
class HeadEntropies:
    """The entropies of every head in nats: their sums over the rows of a case, and the largest difference.

    Each array is [layers, q_heads].
    """

    rows: int
    expected: Doubles
    actual: Doubles
    error: Doubles


class Error(NamedTuple):
    """The largest and the mean difference of all tensors of a kind, relative to the largest number of each tensor."""

    largest: float
    mean: float


@dataclass(frozen=True)
class CaseComparison:
    """The comparison of one case in one runtime with PyTorch.

    `logits_error` is max |difference| / max |PyTorch logit|, and `mean_logits_error` is mean |difference| divided by
    the same number. `entropy_error` and `mean_entropy_error` are in nats, over all layers and heads. `cached` has the
    errors of keys and values in the caches. `tolerance` has the largest errors that pass; its `mean_logits` also limits
    the mean errors of cached keys and values. `rounding` is set if the reference is PyTorch in float64, and has the
    differences of PyTorch in float32 from this reference. A layer attends to something else if its entropies differ by
    more than its entry in `layer_tolerances`.
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
        """Whether all errors are within their tolerance; NaN never is."""
        allowed = self.tolerance
        return (
            self.logits_error <= allowed.logits
            and self.entropy_error <= allowed.entropy
            and self.mean_logits_error <= allowed.mean_logits
            and self.mean_entropy_error <= allowed.mean_entropy
            and all(
                error.largest <= allowed.cached and error.mean <= allowed.mean_logits for error in self.cached.values()
            )
        )

    @property
    def difference(self) -> str:
        """A phrase for messages: the case, the runtime, and each error with its limit."""
        allowed = self.tolerance
        said = (
            f"{self.case!r} ({self.runtime}): logits by {self.logits_error:.1e} ({allowed.logits:.1e} allowed), "
            f"entropy by {self.entropy_error:.1e} ({allowed.entropy:.1e} allowed)"
        )
        wrong = [
            f"{name} by {error.largest:.1e}"
            for name, error in self.cached.items()
            if not error.largest <= allowed.cached
        ]
        far = [
            f"{name} by {error.mean:.1e}"
            for name, error in self.cached.items()
            if not error.mean <= allowed.mean_logits
        ]
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
        """The largest error of an entropy in each layer, in nats."""
        return tuple(self.heads.error.max(axis=1).tolist())

    @property
    def first_wrong_layer(self) -> int | None:
        """The number (from 0) of the first layer whose attention differs from PyTorch's; None if no layer's does."""
        layers = enumerate(zip(self.layer_entropy_errors, self.layer_tolerances, strict=True))
        return next((layer for layer, (error, allowed) in layers if not error <= allowed), None)


def compare(
    runtime: str,
    case: str,
    computed: Sequence[CaseOutputs],
    expected: Sequence[CaseOutputs],
    tolerance: Difference = FLOAT32,
) -> CaseComparison:
    """Compare the outputs in `computed` with those in `expected`, which PyTorch computed for the same sequences.

    `runtime` and `case` are names. Errors beyond `tolerance` raise nothing; see `CaseComparison.passed`.
    """
    pairs = list(zip(computed, expected, strict=True))
    # numpy's maximum is NaN if any number is; Python's ignores NaN unless it comes first.
    logits = np.concatenate([np.abs(found.logits - reference.logits).ravel() for found, reference in pairs])
    largest = float(np.max([np.abs(reference.logits).max() for reference in expected]))
    heads = _head_entropies(pairs)
    return CaseComparison(
        runtime=runtime,
        case=case,
        rows=heads.rows,
        logits_error=float(logits.max()) / largest,
        entropy_error=float(heads.error.max()),
        same_greedy=sum(
            int((found.logits.argmax(-1) == reference.logits.argmax(-1)).sum()) for found, reference in pairs
        ),
        mean_logits_error=float(logits.mean(dtype=np.float64)) / largest,
        mean_entropy_error=float(np.mean(np.concatenate([np.abs(a.entropy - b.entropy).ravel() for a, b in pairs]))),
        heads=heads,
        cached=_cached_errors(pairs),
        tolerance=tolerance,
        layer_tolerances=(tolerance.entropy,) * len(heads.error),
    )


def _cached_errors(pairs: Sequence[tuple[CaseOutputs, CaseOutputs]]) -> dict[str, Error]:
    """Return the errors of cached "keys" and "values", relative to each cache's largest value; empty without caches.

    `pairs` are (outputs, expected) of each case.
    """
    found: dict[str, Error] = {}
    for name in ("keys", "values"):
        caches = [
            (np.abs(actual - reference), np.abs(reference).max())
            for outputs, expected in pairs
            for actual, reference in zip(getattr(outputs, name), getattr(expected, name), strict=True)
        ]
        if caches:
            errors = np.concatenate([(difference / largest).ravel() for difference, largest in caches])
            found[name] = Error(float(errors.max()), float(errors.mean(dtype=np.float64)))
    return found


def _head_entropies(pairs: Sequence[tuple[CaseOutputs, CaseOutputs]]) -> HeadEntropies:
    """Return entropies (nats) of each head [layers, q_heads]: sums over all rows and the largest error.

    `pairs` are (outputs, expected) of each case.
    """
    actual = np.concatenate([found.entropy for found, _ in pairs], axis=1, dtype=np.float64)
    expected = np.concatenate([reference.entropy for _, reference in pairs], axis=1, dtype=np.float64)
    return HeadEntropies(
        rows=actual.shape[1],
        expected=expected.sum(axis=1),
        actual=actual.sum(axis=1),
        error=np.abs(actual - expected).max(axis=1),
    )
