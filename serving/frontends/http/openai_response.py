"""The responses of OpenAI's API: whole, and as the chunks of a stream."""

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharp.serving.api.attention import AttentionSummary, json_numbers
from sharp.serving.api.completion import Completion
from sharp.serving.api.events import Delta, Finished, FinishReason, TokenLogprobs, Usage
from sharp.serving.frontends.http.compact_json import compact_json
from sharp.serving.frontends.http.logprobs import TextLogprobs, chat_logprobs
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.text.chat_forms import MessageParser, MessageParts
from sharp.serving.text.tool_calls import ToolCall

# The API knows no other way to say that a limit cut a completion short. One that was cancelled is an error.
REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_LIMIT: "length",
}
DIGITS = 3  # of a token's entropies, which are as many as the model has heads


@dataclass(frozen=True)
class Extras:
    """Optional fields of a response.

    Attributes:
        token_ids: choices have the ids of their tokens.
        prompts: the ids of each prompt, if requested.
        usage: chunks have the field `usage`, which only the last one fills.
    """

    token_ids: bool = False
    prompts: Sequence[Sequence[int]] = ()
    usage: bool = False


class ResponseBuilder(ABC):
    """The response to one request. Choices are numbered through all completions of all prompts."""

    prefix: str
    whole_object: str
    chunk_object: str
    last_frame = "data: [DONE]\n\n"

    def __init__(self, request_id: str, model: str, texts: TokenTexts, extras: Extras) -> None:
        self._base: dict[str, Any] = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        if extras.usage:
            self._base["usage"] = None
        self._texts = texts
        self._extras = extras

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Everything at once; the completions of a request's prompts, each with its others."""
        all_completions = [(prompt, one) for prompt, first in enumerate(completions) for one in (first, *first.others)]
        choices = [
            {
                "index": index,
                **self._whole(one, prompt, completions[prompt].prompt_logprobs),
                "stop_reason": one.matched,
                **self._token_ids(one.token_ids),
                **_attention(one.attention),
            }
            for index, (prompt, one) in enumerate(all_completions)
        ]
        return {
            **self._base,
            "object": self.whole_object,
            "choices": choices,
            "usage": usage_of([first.usage for first in completions], [one.usage for _, one in all_completions]),
        }

    def frame(self, data: dict[str, Any]) -> str:
        """A chunk as a server-sent event."""
        return f"data: {compact_json(data, 0)}\n\n"

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The chunk of an error, of which `body` is the one of a response."""
        return body

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream with `stream_options.include_usage`."""
        return {**self._base, "object": self.chunk_object, "choices": [], "usage": usage}

    def _chunk(
        self,
        choice: int,
        text: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        matched: str | int | None = None,
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        entry = {"index": choice, **text, "logprobs": logprobs, "finish_reason": reason, **self._token_ids(token_ids)}
        if reason:
            entry["stop_reason"] = matched
        return {**self._base, "object": self.chunk_object, "choices": [entry]}

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self._extras.token_ids else {}

    def _prompt_token_ids(self, prompt: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._extras.prompts[prompt]} if self._extras.prompts else {}

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
        self, completion: Completion, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None
    ) -> dict[str, Any]:
        """Text, logprobs and finish reason of a completion of the prompt of that number, as fields of a choice."""


class CompletionResponse(ResponseBuilder):
    """Of `/v1/completions`. With `echo` every choice begins with its prompt."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, request_id: str, model: str, texts: TokenTexts, extras: Extras, echo: Sequence[tuple[str, int]] = ()
    ) -> None:
        """`echo` has text and first token of each prompt."""
        super().__init__(request_id, model, texts, extras)
        self._echo = echo
        self._echoed: dict[int, dict[str, Any]] = {}  # the logprobs of prompts, made once for all their completions
        self._logprobs: defaultdict[int, TextLogprobs] = defaultdict(lambda: TextLogprobs(texts))  # of choices

    def start(self, choice: int, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None) -> list[dict[str, Any]]:
        """The prompt, with `echo` or `return_token_ids`."""
        if not self._echo and not self._extras.prompts:
            return []
        text = self._echo[prompt][0] if self._echo else ""
        self._logprobs[choice] = TextLogprobs(self._texts, len(text))
        logprobs = None if prompt_logprobs is None else self._of_prompt(prompt, prompt_logprobs)
        return [self._chunk(choice, {"text": text, **self._prompt_token_ids(prompt)}, logprobs)]

    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:
        """Text, once there is some, or token ids if requested."""
        attention = _attention_of_tokens(event)
        if not event.text and not event.logprobs and not self._extras.token_ids and not attention:
            return []
        logprobs = None if event.logprobs is None else self._logprobs[choice].of(event.logprobs)
        return [self._chunk(choice, {"text": event.text, **attention}, logprobs, token_ids=event.token_ids)]

    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:
        """The reason."""
        text = {"text": "", **_attention(event.attention)}
        return [self._chunk(choice, text, None, REASONS[event.reason], event.matched)]

    def _whole(
        self, completion: Completion, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None
    ) -> dict[str, Any]:
        text = self._echo[prompt][0] if self._echo else ""
        logprobs = None if completion.logprobs is None else TextLogprobs(self._texts, len(text)).of(completion.logprobs)
        if self._echo and logprobs is not None:
            before = self._of_prompt(prompt, prompt_logprobs or ())
            logprobs = {name: [*before[name], *values] for name, values in logprobs.items()}
        end = {"finish_reason": REASONS[completion.finish_reason], **self._prompt_token_ids(prompt)}
        return {"text": text + completion.text, "logprobs": logprobs, **end}

    def _of_prompt(self, prompt: int, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        if prompt not in self._echoed:
            text, first = self._echo[prompt]
            self._echoed[prompt] = TextLogprobs(self._texts).of_prompt(first, entries, text)
        return self._echoed[prompt]


class ChatResponse(ResponseBuilder):
    """Of `/v1/chat/completions`. Calls of tools and thoughts are taken out of the text."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, request_id: str, model: str, texts: TokenTexts, extras: Extras, parser: Callable[[], MessageParser]
    ) -> None:
        """`parser` makes one for a choice."""
        super().__init__(request_id, model, texts, extras)
        self._parser = parser
        self._parsers: defaultdict[int, MessageParser] = defaultdict(parser)
        self._known: Counter[int] = Counter()  # calls of each choice so far

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """See `ResponseBuilder`."""
        return {**super().whole(completions), **self._prompt_token_ids(0)}

    def start(
        self,
        choice: int,
        prompt: int,
        prompt_logprobs: Iterable[TokenLogprobs] | None,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        """The role."""
        chunk = self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
        return [{**chunk, **self._prompt_token_ids(prompt)}]

    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:
        """Text and whole calls, once there are some."""
        delta = self._delta(choice, self._parsers[choice].push(event.text))
        attention = _attention_of_tokens(event)
        if not delta and not event.logprobs and not self._extras.token_ids and not attention:
            return []
        logprobs = None if event.logprobs is None else chat_logprobs(self._texts, event.logprobs)
        text = {"delta": delta or {"content": ""}, **attention}
        return [self._chunk(choice, text, logprobs, token_ids=event.token_ids)]

    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:
        """What was held back, and the reason."""
        rest = self._delta(choice, self._parsers[choice].end(cut=event.reason is not FinishReason.STOP))
        chunks = [self._chunk(choice, {"delta": rest})] if rest else []
        text = {"delta": {}, **_attention(event.attention)}
        reason = _reason(event.reason, calls=self._known[choice] > 0)
        return [*chunks, self._chunk(choice, text, None, reason, event.matched)]

    def _delta(self, choice: int, parts: MessageParts) -> dict[str, Any]:
        """The part of a message; empty if there is nothing new."""
        delta: dict[str, Any] = {**_thought(parts.reasoning), **({"content": parts.content} if parts.content else {})}
        if parts.calls:
            known = self._known[choice]
            delta["tool_calls"] = [{"index": known + index, **_call(call)} for index, call in enumerate(parts.calls)]
            self._known[choice] += len(parts.calls)
        return delta

    def _whole(
        self,
        completion: Completion,
        prompt: int,  # noqa: ARG002
        prompt_logprobs: Iterable[TokenLogprobs] | None,  # noqa: ARG002
    ) -> dict[str, Any]:
        parser = self._parser()
        parts, rest = parser.push(completion.text), parser.end(cut=completion.finish_reason is not FinishReason.STOP)
        text, calls = parts.content + rest.content, parts.calls + rest.calls
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        message |= _thought(parts.reasoning + rest.reasoning)
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "message": message,
            "logprobs": None if completion.logprobs is None else chat_logprobs(self._texts, completion.logprobs),
            "finish_reason": _reason(completion.finish_reason, calls=bool(calls)),
        }


def _thought(text: str) -> dict[str, str]:
    """A thought under the name that most clients know, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(reason: FinishReason, *, calls: bool) -> str:
    return "tool_calls" if calls and reason is FinishReason.STOP else REASONS[reason]


def _attention(summary: AttentionSummary | None) -> dict[str, Any]:
    """The field `attention_stats` of a choice, if requested; names are those of `sharp.v1`."""
    if summary is None:
        return {}
    columns = {
        "entropy_nats": summary.entropy,
        "normalized_entropy": summary.normalized_entropy,
        "support_ratio": summary.support_ratio,
        "inverse_temperature": summary.inverse_temperature,
        "logit_spread": summary.logit_spread,
    }
    if summary.sink_mass is not None:
        columns["sink_mass"] = summary.sink_mass
    layers = [
        {name: json_numbers(values[layer]) for name, values in columns.items()} for layer in range(len(summary.entropy))
    ]
    return {"attention_stats": {"tokens": summary.tokens, "layers": layers}}


def _attention_of_tokens(event: Delta) -> dict[str, Any]:
    """The field `attention_stats` of a chunk: of each of its tokens H / ln n [tokens][layers][heads], if requested."""
    found = event.attention
    if found is None:
        return {}
    entropy = json_numbers(found.entropy.astype(np.float64).round(DIGITS))
    return {"attention_stats": {"positions": found.positions.tolist(), "normalized_entropy": entropy}}


def usage_of(prompts: Iterable[Usage], completions: Iterable[Usage]) -> dict[str, Any]:
    """The field `usage`: each prompt counts once, however many completions it has."""
    prompts = tuple(prompts)
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(usage.completion_tokens for usage in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
    }
