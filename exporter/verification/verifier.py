"""The steps of verification: in every runtime, all cases, then greedy decoding, then the prediction of a text."""

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

from sharp.core.errors import VerificationError
from sharp.exporter.verification.comparison import (
    CaseComparison,
    CaseOutputs,
    CaseShape,
    Difference,
    Floats,
    Runtime,
    Tokens,
    compare,
)
from sharp.exporter.verification.greedy_decoding import (
    Append,
    Continuation,
    check_continuation,
    continue_as_drafted,
    continue_greedily,
)
from sharp.exporter.verification.parked_weights import parked
from sharp.exporter.verification.perplexity import TextPrediction, perplexity, runtime_losses, window_of
from sharp.exporter.verification.tolerance import PLAIN, ExportTolerance
from sharp.exporter.verification.torch_outputs import in_float64, with_rounding_noise
from sharp.models.config import SharpConfig

CONTINUATION_TOKENS = 64
PROMPT_TOKENS = 32
INLINED_TEXT_TOKENS = 256  # standard ops are slow: SmolLM2 takes 30 s of processor time for 1024 tokens

# Rounding errors of two runtimes are samples of one distribution. SmolLM2's errors under norm ssa in ONNX Runtime were
# 0.1 to 2.1 times as large as in PyTorch.
ROUNDING_FACTOR = 4
NOISY_RUNS = 3  # runs of PyTorch in float32 with noise, by which a failed case is judged again
MOST = Difference(logits=1e-2, entropy=1e-2, cached=1e-2)
LEAST_NOISE = 1e-5  # nats, because PyTorch in float32 may have no error by chance


class Verifier(Protocol):
    """The interface by which `verify` runs one form of a model: its cases, in PyTorch and in a runtime.

    `writes_text` says that the model is a decoder, which has `begin` and `logits`; `text_step` is the number of tokens
    of a text that one step reads. The type of a session, which `open` returns, depends on the form.
    """

    config: SharpConfig
    writes_text: bool
    text_step: int

    @property
    def model(self) -> nn.Module:
        """The module that PyTorch runs."""
        ...

    @property
    def cases(self) -> Mapping[str, tuple[CaseShape, ...]]:
        """The shape of every sequence of every case, by the name of the case."""
        ...

    def expected(self, case: str) -> list[CaseOutputs]:
        """Compute the sequences of a case in PyTorch, in the model's present precision; one result per sequence."""
        ...

    def open(self, folder: Path, *, kernels: bool) -> Any:
        """Open the written model in ONNX Runtime; `kernels` says whether Sharp's library computes attention."""
        ...

    def run(self, session: Any, case: str) -> list[CaseOutputs]:
        """Compute the sequences of a case in a session of the written model; one result per sequence."""
        ...

    def begin(self, session: Any, tokens: int) -> Append:
        """Start a sequence of at most `tokens`; return a function that appends tokens to it.

        The function takes int64 [new tokens] and returns the logits of all of them, [new tokens, vocab]. Other
        sequences of `session` are dropped. Only for models that write text.
        """
        ...

    def logits(self, tokens: Tokens) -> Floats:
        """Compute the logits [tokens, vocab] after every token int64 [tokens] of a sequence in PyTorch.

        Only for models that write text.
        """
        ...


@dataclass(frozen=True)
class Text:
    """A text that the written model is to predict: its tokens, and the losses [predicted tokens] in PyTorch."""

    tokens: Tokens
    losses: Tensor


@dataclass(frozen=True)
class Verification:
    """The results of all checks of a model folder against PyTorch; `shapes` are the shapes of the compared cases."""

    comparisons: tuple[CaseComparison, ...]
    continuations: tuple[Continuation, ...]
    predictions: tuple[TextPrediction, ...]
    shapes: Mapping[str, tuple[CaseShape, ...]]  # the sequences of every case

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return self.failure is None

    def __add__(self, other: "Verification") -> "Verification":
        """Return a verification with the checks of both, those of `self` first."""
        return Verification(
            self.comparisons + other.comparisons,
            self.continuations + other.continuations,
            self.predictions + other.predictions,
            {**self.shapes, **other.shapes},
        )

    @property
    def failure(self) -> str | None:
        """A sentence on the first check that failed; None if all passed."""
        checks: tuple[CaseComparison | Continuation | TextPrediction, ...]
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
        """The lowest number (from 0) of a layer that attends to something else in a failed case; None if none does."""
        failed = (comparison.first_wrong_layer for comparison in self.comparisons if not comparison.passed)
        return min((layer for layer in failed if layer is not None), default=None)

    def _where(self) -> str:
        """The words that name the first layer that differs in a failed comparison; "" if not known."""
        failed = [comparison for comparison in self.comparisons if not comparison.passed]
        # Where means decide, single entropies differ by much anyway and do not show the layer.
        if not failed or failed[0].tolerance.mean_logits < math.inf:
            return ""
        layer = self.first_wrong_layer
        return (
            "; every layer attends alike, so it is what follows the last"
            if layer is None
            else f", from layer {layer} on"
        )


@dataclass(frozen=True)
class _Run:
    """The results of one runtime: comparisons, the outputs of failed cases, greedy tokens and losses on the text."""

    found: list[CaseComparison]
    failed: dict[str, list[CaseOutputs]]
    continuation: Tokens | None
    losses: Tensor | None


def number_of_checks(verifier: Verifier, runtimes: Sequence[Runtime], text: Text | None) -> int:
    """Return the number of times that `verify` calls `on_check`."""
    in_runtime = len(verifier.cases) + verifier.writes_text + (text is not None)
    return in_runtime * len(runtimes)


def verify(
    verifier: Verifier,
    folder: Path,
    runtimes: Sequence[Runtime],
    text: Text | None,
    on_check: Callable[[], None],
    tolerance: ExportTolerance = PLAIN,
) -> Verification:
    """Compare the written model with PyTorch in every runtime.

    The runtimes run at the same time, unless the model is large. Greedy decoding continues the start of `text`, or
    random tokens if there is no text. The continuation by the first runtime is the draft for the other runtimes. Cases
    that differ by more than `tolerance` are compared with PyTorch in float64 (`against_float64`), unless the tolerance
    is that of quantized weights. `on_check` is called after each check, in the threads of the runtimes. A model that
    differs raises nothing; see `Verification.failure`.

    Raises:
        VerificationError: ONNX Runtime cannot run the model.
        OSError: the weights of a large model cannot be put on disk.
    """
    expected = {case: verifier.expected(case) for case in verifier.cases}
    longest = verifier.config.max_context
    random_tokens = np.random.default_rng(1).integers(0, verifier.config.vocab_size, PROMPT_TOKENS)
    prompt = (random_tokens if text is None else text.tokens)[: max(1, min(PROMPT_TOKENS, longest // 2))]
    continued = min(CONTINUATION_TOKENS, longest - len(prompt) + 1)

    interrupted = Event()
    draft: Future[Tokens] = Future()

    def checked() -> None:
        """Report one check as done. CancelledError if another thread failed."""
        on_check()
        if interrupted.is_set():
            raise CancelledError

    def run_in(runtime: Runtime) -> _Run:
        """Run all cases in a runtime and compare them with PyTorch."""
        session = verifier.open(folder, kernels=runtime.kernels)
        found: list[CaseComparison] = []
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
        except BaseException as error:  # Ctrl-C is raised here, and threads must end before the pool can close
            interrupted.set()
            draft.cancel()
            if type(error).__module__.startswith("onnxruntime"):
                reason = str(error).strip().split("\n")[0][:300]
                raise VerificationError(f"ONNX Runtime cannot run the model, which is not written: {reason}") from error
            raise
    return _judge(verifier, runs, expected, prompt, text, tolerance)


def _judge(
    verifier: Verifier,
    runs: Mapping[str, _Run],
    expected: Mapping[str, list[CaseOutputs]],
    prompt: Tokens,
    text: Text | None,
    tolerance: ExportTolerance,
) -> Verification:
    """Return the verification: PyTorch's results compared with those of every runtime, by the runtime's name.

    `expected` are PyTorch's results per case, `prompt` the tokens of the continuation, and `text` the tokens whose
    losses are compared, if any.
    """
    found = [comparison for run in runs.values() for comparison in run.found]
    failed = {
        index: runs[comparison.runtime].failed[comparison.case]
        for index, comparison in enumerate(found)
        if not comparison.passed
    }
    computed = {name: run.continuation for name, run in runs.items() if run.continuation is not None}
    losses = {name: run.losses for name, run in runs.items() if run.losses is not None}
    if failed and tolerance.between_runtimes is None:  # float64 does not show errors of quantization
        for index, comparison in against_float64(verifier, expected, found, failed).items():
            found[index] = comparison
    allowed = max(comparison.tolerance.logits for comparison in found)
    continuations = check_continuation(computed, prompt, verifier.logits, allowed)
    predictions = () if text is None else _predictions(text, losses, tolerance)
    return Verification(tuple(found), continuations, predictions, verifier.cases)


def _predictions(text: Text, losses: Mapping[str, Tensor], tolerance: ExportTolerance) -> tuple[TextPrediction, ...]:
    """Compare the `losses` of every runtime, on the whole text or its first tokens, with those of its reference."""
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
    found: Sequence[CaseComparison],
    failed: Mapping[int, list[CaseOutputs]],
) -> dict[int, CaseComparison]:
    """Compare the outputs of `failed` cases with PyTorch in float64.

    Keys of `failed` and of the result are indices in `found`. `expected` has the outputs of PyTorch in float32 by case.

    Some models amplify rounding. Under a norm that SmolLM2 was not trained with, the order of float32 sums changes the
    logits of single tokens by 1e-4. So a runtime may differ from PyTorch in float64 by `ROUNDING_FACTOR` times the
    difference of PyTorch in float32 in the same case, if that is more than the tolerance, but never by more than
    `MOST`. The difference is the largest of several runs in float32, all but the first with noise of the size of
    rounding: a single run may be near to float64 by chance.
    """
    cases = sorted({found[index].case for index in failed})
    with in_float64(verifier.model):
        exact = {case: verifier.expected(case) for case in cases}
    noisy: dict[str, list[list[CaseOutputs]]] = {case: [] for case in cases}
    for seed in range(NOISY_RUNS):
        with with_rounding_noise(verifier.model, seed):
            for case in cases:
                noisy[case].append(verifier.expected(case))
    judged: dict[int, CaseComparison] = {}
    for index, said in failed.items():
        before = found[index]
        owns = [
            compare("torch", before.case, outputs, exact[before.case])
            for outputs in (expected[before.case], *noisy[before.case])
        ]
        rounding = Difference(
            max(own.logits_error for own in owns),
            max(own.entropy_error for own in owns),
            max((error.largest for own in owns for error in own.cached.values()), default=0.0),
        )
        tolerance = replace(
            before.tolerance,
            logits=_allowed(before.tolerance.logits, rounding.logits, MOST.logits),
            entropy=_allowed(before.tolerance.entropy, rounding.entropy, MOST.entropy),
            cached=_allowed(before.tolerance.cached, rounding.cached, MOST.cached),
        )
        anew = compare(before.runtime, before.case, said, exact[before.case], tolerance)
        # The input of a layer has the rounding errors of all earlier layers.
        layers = np.maximum.accumulate(np.max([own.layer_entropy_errors for own in owns], axis=0))
        noise = tuple(np.maximum(ROUNDING_FACTOR * layers, LEAST_NOISE).tolist())
        judged[index] = replace(anew, rounding=rounding, layer_tolerances=noise)
    return judged


def _allowed(floor: float, rounding: float, most: float) -> float:
    """Return the limit of an error: a multiple of PyTorch's own `rounding`, at most `most`, and at least `floor`."""
    return max(floor, min(ROUNDING_FACTOR * rounding, most))
