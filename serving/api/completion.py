"""`Completion`: a whole answer, put together from the events of the engine."""

from dataclasses import dataclass, field, replace

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
    """An answer to one prompt.

    Attributes:
        text: the generated text; empty for a model without a tokenizer.
        token_ids: the generated tokens, with the one that ended the answer.
        finish_reason: "stop", "length", "time_limit" or "cancelled".
        matched: the stop string or stop token that ended the answer.
        usage: how many tokens prompt and answer have, and how many of them the prefix cache had.
        timing: seconds since the request was made.
        attention: means over the tokens of this request that were computed for it, when asked for.
        logprobs: one entry per generated token, when `logprobs` asks for it.
        prompt_logprobs: one entry per token of the prompt after the first, when `prompt_logprobs` asks for it.
        others: the other answers to this prompt, when `n` asks for them.
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
class _Answer:
    """What came so far; `logprobs` stays empty unless asked for."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None


@dataclass
class Answers:
    """The answers to one request."""

    params: SamplingParams
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    each: list[_Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.each = [_Answer() for _ in range(self.params.n)]

    def take(self, event: Event) -> None:
        """Add what an event says."""
        if isinstance(event, PromptComputed):
            # No message tells an empty tuple, of a prompt of one token, from none.
            self.prompt_logprobs = None if self.params.prompt_logprobs is None else event.logprobs or ()
        elif isinstance(event, Delta):
            answer = self.each[event.index]
            answer.text.append(event.text)
            answer.token_ids.extend(event.token_ids)
            answer.logprobs.extend(event.logprobs or ())
        elif isinstance(event, Finished):
            self.each[event.index].finished = event
        elif isinstance(event, Failed):
            raise event.error

    def completion(self) -> Completion:
        """All of it, once every answer is complete."""
        first, *others = (self._completion(answer) for answer in self.each)
        return replace(first, prompt_logprobs=self.prompt_logprobs, others=tuple(others))

    def _completion(self, answer: _Answer) -> Completion:
        finished = answer.finished
        if finished is None:
            raise RuntimeError("the engine lost a request")
        return Completion(
            "".join(answer.text),
            tuple(answer.token_ids),
            finished.reason,
            finished.matched,
            finished.usage,
            finished.timing,
            finished.attention,
            None if self.params.logprobs is None else tuple(answer.logprobs),
        )
