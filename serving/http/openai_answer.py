"""The answers of OpenAI's API: whole, and as the chunks of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from sharp.serving.attention import AttentionSummary, json_numbers
from sharp.serving.completion import Completion
from sharp.serving.engine.events import Delta, Finished, FinishReason, TokenLogprobs, Usage
from sharp.serving.tokenizer import Tokenizer

# The API knows no other way to say that an answer was cut short.
REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_LIMIT: "length",
    FinishReason.CANCELLED: "length",
}


class Answer(ABC):
    """The shape of one request's answer. Choices are numbered through all answers to all prompts."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer | None) -> None:
        self._base = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Everything at once; the completions of a request's prompts, each with its others."""
        answers = [answer for first in completions for answer in (first, *first.others)]
        choices = [
            {
                "index": index,
                **self._text(answer.text),
                "logprobs": self._logprobs(answer.logprobs),
                "finish_reason": REASONS[answer.finish_reason],
                "stop_reason": answer.matched,
                **_attention(answer.attention),
            }
            for index, answer in enumerate(answers)
        ]
        return {
            **self._base,
            "object": self.whole_object,
            "choices": choices,
            "usage": usage_of([first.usage for first in completions], [answer.usage for answer in answers]),
        }

    def start(self, choices: int) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return [self._chunk(index, delta) for index in range(choices) for delta in self._opening()]

    def delta(self, choice: int, event: Delta) -> dict[str, Any]:
        """The chunk of new tokens."""
        return self._chunk(choice, self._delta_text(event.text), self._logprobs(event.logprobs))

    def finished(self, choice: int, event: Finished) -> dict[str, Any]:
        """The last chunk of a choice."""
        text = {**self._delta_text(None), **_attention(event.attention)}
        return self._chunk(choice, text, None, REASONS[event.reason], event.matched)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream that was asked for it."""
        return {**self._base, "object": self.chunk_object, "choices": [], "usage": usage}

    def _chunk(
        self,
        choice: int,
        text: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        matched: str | int | None = None,
    ) -> dict[str, Any]:
        entry = {"index": choice, **text, "logprobs": logprobs, "finish_reason": reason}
        if reason:
            entry["stop_reason"] = matched
        return {**self._base, "object": self.chunk_object, "choices": [entry]}

    def _token(self, token_id: int) -> str:
        return self._tokenizer.token(token_id) if self._tokenizer else f"token_id:{token_id}"

    @abstractmethod
    def _text(self, text: str) -> dict[str, Any]:
        """A whole text as fields of a choice."""

    @abstractmethod
    def _delta_text(self, text: str | None) -> dict[str, Any]:
        """New text as fields of a choice; None: nothing follows."""

    @abstractmethod
    def _opening(self) -> list[dict[str, Any]]:
        """What a choice of a stream begins with."""

    @abstractmethod
    def _logprobs(self, entries: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        """The field `logprobs` of a choice."""


class TextAnswer(Answer):
    """Of `/v1/completions`."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta_text(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _opening(self) -> list[dict[str, Any]]:
        return []

    def _logprobs(self, entries: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        entries = tuple(entries)
        return {
            "tokens": [self._token(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._token(token): logprob for token, logprob in entry.top} for entry in entries],
        }


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta_text(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _opening(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def _logprobs(self, entries: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        content = [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token(token_id)
        whole = "\ufffd" not in text  # else a part of a character, and its bytes are not known here
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def _attention(summary: AttentionSummary | None) -> dict[str, Any]:
    """The field `attention_stats` of a choice, where it was asked for; names are those of `sharp.v1`."""
    if summary is None:
        return {}
    columns = {
        "entropy_nats": summary.entropy,
        "normalized_entropy": summary.normalized_entropy,
        "support_ratio": summary.support_ratio,
        "inverse_temperature": summary.inverse_temperature,
        "logit_spread": summary.logit_spread,
    }
    layers = [
        {name: json_numbers(values[layer]) for name, values in columns.items()} for layer in range(len(summary.entropy))
    ]
    return {"attention_stats": {"tokens": summary.tokens, "layers": layers}}


def usage_of(prompts: Iterable[Usage], answers: Iterable[Usage]) -> dict[str, Any]:
    """The field `usage`: each prompt counts once, however many answers it has."""
    prompts = tuple(prompts)
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(usage.completion_tokens for usage in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
    }
