"""`Completion`: the output of one sequence. `CompletionBuilder`: builds it from the engine's events."""

from array import array
from dataclasses import dataclass, field, replace
from io import StringIO

from sharp.serving.api.attention import AttentionSummary
from sharp.serving.api.events import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptComputed,
    Timing,
    TokenLogprobs,
    Usage,
)
from sharp.serving.api.sampling_params import SamplingParams


@dataclass(frozen=True)
class Completion:
    """A completion of one prompt.

    Attributes:
        text: the generated text; empty for a model without a tokenizer.
        token_ids: the generated tokens, including the stop token that ended them.
        finish_reason: "stop", "length", "time_limit" or "cancelled".
        matched: the stop string or stop token that ended generation; None if none did.
        usage: token counts of prompt and completion, and prompt tokens found in the prefix cache.
        timing: seconds since the request arrived at the engine.
        attention: means over the tokens computed for this request; None if not requested.
        logprobs: one entry per generated token, if `SamplingParams.logprobs` is set.
        prompt_logprobs: one entry per prompt token after the first, if `SamplingParams.prompt_logprobs` is set.
        others: the other `n - 1` completions of this prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched: str | int | None
    usage: Usage
    timing: Timing
    attention: AttentionSummary | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    others: tuple["Completion", ...] = ()


@dataclass
class _Sequence:
    """The output of one sequence so far."""

    text: StringIO = field(default_factory=StringIO)
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None


class CompletionBuilder:
    """A builder of one request's `Completion`: give `add` every event of the request, then call `build`."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._sequences = [_Sequence() for _ in range(params.n)]

    def add(self, event: Event) -> None:
        """Take an event of the request. `Accepted` and `ComputedRows` change nothing.

        Raises:
            SharpError: the error of a `Failed` event.
        """
        if isinstance(event, PromptComputed):
            # A prompt of one token has no logprobs, and messages do not distinguish its empty tuple from None.
            self._prompt_logprobs = None if self._params.prompt_logprobs is None else event.logprobs or ()
        elif isinstance(event, Delta):
            sequence = self._sequences[event.index]
            sequence.text.write(event.text)
            sequence.token_ids.extend(event.token_ids)
            sequence.logprobs.extend(event.logprobs or ())
        elif isinstance(event, Finished):
            self._sequences[event.index].finished = event
        elif isinstance(event, Failed):
            raise event.error

    def build(self) -> Completion:
        """Return the first sequence's completion, with the other sequences' in `others`.

        Raises:
            RuntimeError: a sequence has had no `Finished` event.
        """
        first, *others = (self._completion(sequence) for sequence in self._sequences)
        return replace(first, prompt_logprobs=self._prompt_logprobs, others=tuple(others))

    def _completion(self, sequence: _Sequence) -> Completion:
        """Return the completion of a finished sequence. RuntimeError if the engine lost the sequence."""
        finished = sequence.finished
        if finished is None:
            raise RuntimeError("the engine lost a request")
        return Completion(
            sequence.text.getvalue(),
            tuple(sequence.token_ids),
            finished.reason,
            finished.matched,
            finished.usage,
            finished.timing,
            finished.attention,
            None if self._params.logprobs is None else tuple(sequence.logprobs),
        )
