"""The order of verification: every case, then greedy tokens and the prediction of a text, in every runtime."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from sharp.exporter.verification.comparison import (
    CaseOutputs,
    Comparison,
    Difference,
    Floats,
    Runtime,
    Shape,
    Tokens,
    compare,
)
from sharp.exporter.verification.float64 import in_float64
from sharp.exporter.verification.greedy_decoding import (
    Append,
    Continuation,
    check_continuation,
    continue_as_drafted,
    continue_greedily,
)
from sharp.exporter.verification.parked_weights import parked
from sharp.exporter.verification.perplexity import TextPrediction, perplexity, runtime_losses, window_of
from sharp.exporter.verification.tolerance import PLAIN, Tolerance
from sharp.models.config import SharpConfig
from sharp.plugins.errors import VerificationError

CONTINUATION_TOKENS = 64
PROMPT_TOKENS = 32
INLINED_TEXT_TOKENS = 256  # standard ops are slow: SmolLM2 takes 30 s of processor time for 1024 tokens

# Errors of rounding are samples of one distribution: SmolLM2's under norm ssa in ONNX Runtime were 0.1 to 2.1 times
# as large as in PyTorch.
ROUNDING_FACTOR = 4
MOST = Difference(logits=1e-2, entropy=1e-2, cached=1e-2)
LEAST_NOISE = 1e-5  # nats; PyTorch in float32 may be exact by chance


class Verifier(Protocol):
    """One form of a model: the cases it is tried in, what PyTorch says to them, and how a runtime is asked.

    A session is what `open` returned; it is of the form's own kind.
    """

    config: SharpConfig
    writes_text: bool  # a decoder: `begin` and `logits` are there for it
    text_step: int  # tokens of a text that it reads at a time

    @property
    def model(self) -> nn.Module:
        """All that PyTorch runs."""
        ...

    @property
    def cases(self) -> Mapping[str, tuple[Shape, ...]]:
        """Every sequence of every case."""
        ...

    def expected(self, case: str) -> list[CaseOutputs]:
        """What PyTorch says to every sequence of the case, in its present precision."""
        ...

    def open(self, folder: Path, *, kernels: bool) -> Any:
        """The written model in ONNX Runtime, with Sharp's library or without."""
        ...

    def run(self, session: Any, case: str) -> list[CaseOutputs]:
        """What the written model says to every sequence of the case."""
        ...

    def begin(self, session: Any, tokens: int) -> Append:
        """Start a sequence of at most so many tokens."""
        ...

    def logits(self, tokens: Tokens) -> Floats:
        """PyTorch's logits [tokens, vocab] after every token of a sequence."""
        ...


@dataclass(frozen=True)
class Text:
    """A text that the written model is to predict: its tokens, and PyTorch's losses [predicted tokens]."""

    tokens: Tokens
    losses: Tensor


@dataclass(frozen=True)
class Verification:
    """All that was found."""

    comparisons: tuple[Comparison, ...]
    continuations: tuple[Continuation, ...]
    predictions: tuple[TextPrediction, ...]
    shapes: Mapping[str, tuple[Shape, ...]]  # of the cases

    @property
    def passed(self) -> bool:
        """Nothing differs by more than it may."""
        return self.failure is None

    def __add__(self, other: "Verification") -> "Verification":
        """The checks of both."""
        return Verification(
            self.comparisons + other.comparisons,
            self.continuations + other.continuations,
            self.predictions + other.predictions,
            {**self.shapes, **other.shapes},
        )

    @property
    def failure(self) -> str | None:
        """What differs, in one sentence; None where nothing does."""
        checks: tuple[Comparison | Continuation | TextPrediction, ...]
        checks = (*self.comparisons, *self.continuations, *self.predictions)
        failed = [check for check in checks if not check.passed]
        if not failed:
            return None
        return (
            f"the exported model differs from PyTorch in {len(failed)} of {len(checks)} checks, first in "
            f"{failed[0].difference}{self._where()}"
        )

    @property
    def first_wrong_layer(self) -> int | None:
        """The first layer that attends to something else in a case that failed."""
        failed = (comparison.first_wrong_layer for comparison in self.comparisons if not comparison.passed)
        return min((layer for layer in failed if layer is not None), default=None)

    def _where(self) -> str:
        failed = [comparison for comparison in self.comparisons if not comparison.passed]
        if not failed or failed[0].tolerance.mean_logits < math.inf:  # entropies of single rows say little there
            return ""
        layer = self.first_wrong_layer
        return (
            "; every layer attends alike, so it is what follows the last"
            if layer is None
            else f", from layer {layer} on"
        )


@dataclass(frozen=True)
class _Run:
    """What one runtime said: compared case by case, and whole where a case failed; its greedy tokens and its losses."""

    found: list[Comparison]
    failed: dict[str, list[CaseOutputs]]
    continuation: Tokens | None
    losses: Tensor | None


def number_of_checks(verifier: Verifier, runtimes: Sequence[Runtime], text: Text | None) -> int:
    """How often `verify` calls `on_check`."""
    in_runtime = len(verifier.cases) + verifier.writes_text + (text is not None)
    return in_runtime * len(runtimes)


def verify(
    verifier: Verifier,
    folder: Path,
    runtimes: Sequence[Runtime],
    text: Text | None,
    on_check: Callable[[], None],
    tolerance: Tolerance = PLAIN,
) -> Verification:
    """Compare the written model with PyTorch in every runtime; at the same time, unless the model is large.

    The greedy tokens continue the start of `text`, or random tokens where there is none; the first runtime's is
    the draft of the others'. Cases that differ by more than `tolerance` are judged anew, see `against_float64`.
    """
    expected = {case: verifier.expected(case) for case in verifier.cases}
    longest = verifier.config.max_context
    random_tokens = np.random.default_rng(1).integers(0, verifier.config.vocab_size, PROMPT_TOKENS)
    prompt = (random_tokens if text is None else text.tokens)[: max(1, min(PROMPT_TOKENS, longest // 2))]
    continued = min(CONTINUATION_TOKENS, longest - len(prompt) + 1)

    interrupted = Event()
    draft: Future[Tokens] = Future()

    def checked() -> None:
        on_check()
        if interrupted.is_set():
            raise CancelledError

    def run_in(runtime: Runtime) -> _Run:
        session = verifier.open(folder, kernels=runtime.kernels)
        found: list[Comparison] = []
        failed: dict[str, list[CaseOutputs]] = {}
        continuation = losses = None
        for case in verifier.cases:
            said = verifier.run(session, case)
            found.append(compare(runtime.name, case, said, expected[case], tolerance.difference))
            if not found[-1].passed:
                failed[case] = said
            checked()
        if verifier.writes_text:
            begin = partial(verifier.begin, session, len(prompt) + continued)
            if runtime == runtimes[0]:
                continuation = continue_greedily(begin(), prompt, continued)
                draft.set_result(continuation)
            else:
                continuation = continue_as_drafted(begin, prompt, draft.result())
            checked()
        if text is not None:
            begin_text = partial(verifier.begin, session)
            tokens = text.tokens if runtime.kernels else text.tokens[:INLINED_TEXT_TOKENS]
            losses = runtime_losses(begin_text, tokens, window_of(verifier.config), verifier.text_step)
            checked()
        return _Run(found, failed, continuation, losses)

    with parked(verifier.model, folder) as large, ThreadPoolExecutor(1 if large else len(runtimes)) as pool:
        try:
            runs = dict(zip((name for name, _ in runtimes), pool.map(run_in, runtimes), strict=True))
        except BaseException as error:  # Ctrl-C arrives here, and the pool waits for its threads
            interrupted.set()
            draft.cancel()
            if type(error).__module__.startswith("onnxruntime"):
                reason = str(error).strip().split("\n")[0][:300]
                raise VerificationError(f"ONNX Runtime cannot run the model, which is not written: {reason}") from error
            raise
    found = [comparison for run in runs.values() for comparison in run.found]
    failed = {index: runs[one.runtime].failed[one.case] for index, one in enumerate(found) if not one.passed}
    computed = {name: run.continuation for name, run in runs.items() if run.continuation is not None}
    losses = {name: run.losses for name, run in runs.items() if run.losses is not None}
    if failed and tolerance.between_runtimes is None:  # quantization is no rounding of sums
        for index, comparison in against_float64(verifier, expected, found, failed).items():
            found[index] = comparison
    allowed = max(comparison.tolerance.logits for comparison in found)
    continuations = check_continuation(computed, prompt, verifier.logits, allowed)
    predictions = () if text is None else _predictions(text, losses, tolerance)
    return Verification(tuple(found), continuations, predictions, verifier.cases)


def _predictions(text: Text, losses: Mapping[str, Tensor], tolerance: Tolerance) -> tuple[TextPrediction, ...]:
    """What the runtimes' `losses` say, of all the text or of its first tokens."""
    between = tolerance.between_runtimes
    first = next(iter(losses))
    judged: list[TextPrediction] = []
    for runtime, found in losses.items():
        reference, expected, allowed = "PyTorch", text.losses, tolerance.perplexity
        if between is not None and runtime != first:
            reference, expected, allowed = first, losses[first], between
        ours, theirs = perplexity(found), perplexity(expected[: len(found)])
        may_fall = between is not None and runtime == first
        judged.append(
            TextPrediction(runtime, len(found), ours, reference, theirs, ours / theirs - 1, allowed, may_fall)
        )
    return tuple(judged)


def against_float64(
    verifier: Verifier,
    expected: Mapping[str, list[CaseOutputs]],
    found: Sequence[Comparison],
    failed: Mapping[int, list[CaseOutputs]],
) -> dict[int, Comparison]:
    """The comparisons of the failed computed with PyTorch in float64, by their index in `found`.

    Some models amplify rounding: under a norm that SmolLM2 never saw, the order of float32 sums changes the logits of
    single tokens by 1e-4. So a runtime may be `ROUNDING_FACTOR` times as far from PyTorch in float64 as PyTorch in
    float32 is in the same case, where that is more than the tolerance, and never more than `MOST`.
    """
    cases = sorted({found[index].case for index in failed})
    with in_float64(verifier.model):
        exact = {case: verifier.expected(case) for case in cases}
    judged: dict[int, Comparison] = {}
    for index, said in failed.items():
        before = found[index]
        own = compare("torch", before.case, expected[before.case], exact[before.case])
        rounding = Difference(
            own.logits_error, own.entropy_error, max((error.largest for error in own.cached.values()), default=0.0)
        )
        tolerance = replace(
            before.tolerance,
            logits=_allowed(before.tolerance.logits, rounding.logits, MOST.logits),
            entropy=_allowed(before.tolerance.entropy, rounding.entropy, MOST.entropy),
            cached=_allowed(before.tolerance.cached, rounding.cached, MOST.cached),
        )
        anew = compare(before.runtime, before.case, said, exact[before.case], tolerance)
        # What a layer gets from those before it has their rounding.
        layers = np.maximum.accumulate(own.layer_entropy_errors)
        noise = tuple(np.maximum(ROUNDING_FACTOR * layers, LEAST_NOISE).tolist())
        judged[index] = replace(anew, rounding=rounding, layer_tolerances=noise)
    return judged


def _allowed(floor: float, rounding: float, most: float) -> float:
    return max(floor, min(ROUNDING_FACTOR * rounding, most))
