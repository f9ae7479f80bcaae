"""The answers of OpenAI's API: whole, and as the chunks of a stream."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from sharp.serving.attention import AttentionSummary, json_numbers
from sharp.serving.completion import Completion
from sharp.serving.engine.events import Delta, Finished, FinishReason, TokenLogprobs, Usage
from sharp.serving.tokenizer import Tokenizer
from sharp.serving.tool_calls import ToolCall, ToolCallParser

# The API knows no other way to say that an answer was cut short.
REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_LIMIT: "length",
    FinishReason.CANCELLED: "length",
}
# Of a token that cannot come: JSON has no infinity. vLLM's number.
LOWEST_LOGPROB = -9999.0


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
        answers = [(prompt, one) for prompt, first in enumerate(completions) for one in (first, *first.others)]
        choices = [
            {
                "index": index,
                **self._whole(answer, prompt, completions[prompt].prompt_logprobs),
                "stop_reason": answer.matched,
                **_attention(answer.attention),
            }
            for index, (prompt, answer) in enumerate(answers)
        ]
        return {
            **self._base,
            "object": self.whole_object,
            "choices": choices,
            "usage": usage_of([first.usage for first in completions], [answer.usage for _, answer in answers]),
        }

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
    def start(self, choice: int, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None) -> list[dict[str, Any]]:
        """The chunks of a choice before its first token, once the prompt of that number is computed."""

    @abstractmethod
    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:
        """The chunks of new tokens."""

    @abstractmethod
    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:
        """The last chunks of a choice."""

    @abstractmethod
    def _whole(
        self, answer: Completion, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None
    ) -> dict[str, Any]:
        """Text, logprobs and end of an answer to the prompt of that number, as fields of a choice."""


class TextAnswer(Answer):
    """Of `/v1/completions`. With `echo` every choice begins with its prompt."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer | None, echo: Sequence[tuple[str, int]] = ()
    ) -> None:
        """`echo` has text and first token of each prompt."""
        super().__init__(request_id, model, tokenizer)
        self._echo = echo

    def start(self, choice: int, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None) -> list[dict[str, Any]]:
        """The prompt, if it is to be repeated."""
        if not self._echo:
            return []
        text, first = self._echo[prompt]
        return [self._chunk(choice, {"text": text}, self._logprobs(prompt_logprobs, first))]

    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:
        """Text, once there is some."""
        if not event.text and not event.logprobs:
            return []
        return [self._chunk(choice, {"text": event.text}, self._logprobs(event.logprobs))]

    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:
        """The reason."""
        text = {"text": "", **_attention(event.attention)}
        return [self._chunk(choice, text, None, REASONS[event.reason], event.matched)]

    def _whole(
        self, answer: Completion, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None
    ) -> dict[str, Any]:
        text, first, entries = "", None, answer.logprobs
        if self._echo:
            text, first = self._echo[prompt]
            entries = None if entries is None else (*(prompt_logprobs or ()), *entries)
        return {
            "text": text + answer.text,
            "logprobs": self._logprobs(entries, first),
            "finish_reason": REASONS[answer.finish_reason],
        }

    def _logprobs(self, entries: Iterable[TokenLogprobs] | None, first: int | None = None) -> dict[str, Any] | None:
        """The field `logprobs` of a choice; nothing predicts the `first` token of a prompt."""
        if entries is None:
            return None
        entries = tuple(entries)
        tokens = [self._token(entry.token_id) for entry in entries]
        values: list[float | None] = [_finite(entry.logprob) for entry in entries]
        tops = [{self._token(token): _finite(logprob) for token, logprob in entry.top} for entry in entries]
        if first is None:
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        return {
            "tokens": [self._token(first), *tokens],
            "token_logprobs": [None, *values],
            "top_logprobs": [None, *tops],
        }


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`. Where there are `tools`, calls of them are taken out of the text."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer | None, *, tools: bool = False, several: bool = True
    ) -> None:
        """Unless `several` are wanted, an answer has one call at most."""
        super().__init__(request_id, model, tokenizer)
        self._tools = tools
        self._several = several
        self._parsers: defaultdict[int, ToolCallParser] = defaultdict(self._parser)

    def _parser(self) -> ToolCallParser:
        return ToolCallParser(several=self._several)

    def start(
        self,
        choice: int,
        prompt: int,  # noqa: ARG002
        prompt_logprobs: Iterable[TokenLogprobs] | None,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        """The role."""
        return [self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})]

    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:
        """Text and whole calls, once there are some."""
        parser = self._parsers[choice]
        known = len(parser.calls)
        text, calls = parser.push(event.text) if self._tools else (event.text, [])
        if not text and not calls and not event.logprobs:
            return []
        delta: dict[str, Any] = {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = [{"index": known + place, **_call(call)} for place, call in enumerate(calls)]
        return [self._chunk(choice, {"delta": delta}, self._logprobs(event.logprobs))]

    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:
        """What was held back, and the reason."""
        parser = self._parsers[choice]
        rest = parser.end()
        chunks = [self._chunk(choice, {"delta": {"content": rest}})] if rest else []
        text = {"delta": {}, **_attention(event.attention)}
        return [*chunks, self._chunk(choice, text, None, _reason(event.reason, parser.calls), event.matched)]

    def _whole(
        self,
        answer: Completion,
        prompt: int,  # noqa: ARG002
        prompt_logprobs: Iterable[TokenLogprobs] | None,  # noqa: ARG002
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        calls: list[ToolCall] = []
        if self._tools:
            parser = self._parser()
            text, calls = parser.push(answer.text)
            text += parser.end()
            message["content"] = text if text or not calls else None
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": _reason(answer.finish_reason, calls),
        }

    def _logprobs(self, entries: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        """The field `logprobs` of a choice."""
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
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN is not greater, either


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(reason: FinishReason, calls: Sequence[ToolCall]) -> str:
    return "tool_calls" if calls and reason is FinishReason.STOP else REASONS[reason]


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
