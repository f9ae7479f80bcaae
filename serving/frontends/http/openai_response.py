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

# OpenAI's API has only `length` for a completion that a limit cut short. A cancelled completion is an error.
REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_LIMIT: "length",
}
DIGITS = 3  # of a token's entropies; a token has an entropy for each head


@dataclass(frozen=True)
class Extras:
    """Optional fields of a response.

    Attributes:
        token_ids: whether choices have the ids of their tokens.
        prompts: the ids of each prompt, if requested.
        usage: whether chunks have the field `usage`, which only the last chunk fills.
    """

    token_ids: bool = False
    prompts: Sequence[Sequence[int]] = ()
    usage: bool = False


class ResponseBuilder(ABC):
    """The builder of the response to one request: whole, or as the chunks of a stream.

    Choices are numbered from 0 through all completions of all prompts. Subclasses write the form of their API.
    """

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
        """Return the whole response. Each of `completions` is the first of a prompt and holds the others."""
        all_completions = [
            (prompt, completion) for prompt, first in enumerate(completions) for completion in (first, *first.others)
        ]
        choices = [
            {
                "index": index,
                **self._whole(completion, prompt, completions[prompt].prompt_logprobs),
                "stop_reason": completion.matched,
                **self._token_ids(completion.token_ids),
                **_attention(completion.attention),
            }
            for index, (prompt, completion) in enumerate(all_completions)
        ]
        return {
            **self._base,
            "object": self.whole_object,
            "choices": choices,
            "usage": usage_of(
                [first.usage for first in completions], [completion.usage for _, completion in all_completions]
            ),
        }

    def frame(self, data: dict[str, Any]) -> str:
        """Return a chunk, a JSON object, as the text of a server-sent event."""
        return f"data: {compact_json(data, 0)}\n\n"

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk of an error, from the `body` of an error response."""
        return body

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk of a stream with `stream_options.include_usage`."""
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
        """Return a chunk, a JSON object, of choice number `choice`; `matched` is the stop string or stop token."""
        entry = {"index": choice, **text, "logprobs": logprobs, "finish_reason": reason, **self._token_ids(token_ids)}
        if reason:
            entry["stop_reason"] = matched
        return {**self._base, "object": self.chunk_object, "choices": [entry]}

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the field with token ids; empty if the request did not ask for them."""
        return {"token_ids": token_ids} if self._extras.token_ids else {}

    def _prompt_token_ids(self, prompt: int) -> dict[str, Any]:
        """Return the field with the ids of a prompt, by number; empty if the request did not ask for them."""
        return {"prompt_token_ids": self._extras.prompts[prompt]} if self._extras.prompts else {}

    @abstractmethod
    def start(self, choice: int, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None) -> list[dict[str, Any]]:
        """Return the chunks of a choice before its first token, once the prompt with this number is computed."""

    @abstractmethod
    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:
        """Return the chunks of a stream, as JSON objects, for new tokens of the choice with this number."""

    @abstractmethod
    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:
        """Return the last chunks of the choice with this number, with its finish reason."""

    @abstractmethod
    def _whole(
        self, completion: Completion, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None
    ) -> dict[str, Any]:
        """Return text, logprobs and finish reason of a completion of prompt number `prompt`, as fields of a choice."""


class CompletionResponse(ResponseBuilder):
    """The response of `/v1/completions`. With `echo` every choice begins with its prompt."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, request_id: str, model: str, texts: TokenTexts, extras: Extras, echo: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Let choices begin with their prompts: `echo` has the text and first token id of each prompt, or is empty."""
        super().__init__(request_id, model, texts, extras)
        self._echo = echo
        self._echoed: dict[int, dict[str, Any]] = {}  # the logprobs of prompts, made once for all their completions
        self._logprobs: defaultdict[int, TextLogprobs] = defaultdict(lambda: TextLogprobs(texts))  # by choice

    def start(self, choice: int, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None) -> list[dict[str, Any]]:
        """Return a chunk with the prompt if the request asks for `echo` or `return_token_ids`; else an empty list."""
        if not self._echo and not self._extras.prompts:
            return []
        text = self._echo[prompt][0] if self._echo else ""
        self._logprobs[choice] = TextLogprobs(self._texts, len(text))
        logprobs = None if prompt_logprobs is None else self._of_prompt(prompt, prompt_logprobs)
        return [self._chunk(choice, {"text": text, **self._prompt_token_ids(prompt)}, logprobs)]

    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:
        """Return a chunk of new tokens; an empty list if their text is empty and nothing else was requested."""
        attention = _attention_of_tokens(event)
        if not event.text and not event.logprobs and not self._extras.token_ids and not attention:
            return []
        logprobs = None if event.logprobs is None else self._logprobs[choice].of(event.logprobs)
        return [self._chunk(choice, {"text": event.text, **attention}, logprobs, token_ids=event.token_ids)]

    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:
        """Return a list of one chunk, with the finish reason of choice number `choice`."""
        text = {"text": "", **_attention(event.attention)}
        return [self._chunk(choice, text, None, REASONS[event.reason], event.matched)]

    def _whole(
        self, completion: Completion, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None
    ) -> dict[str, Any]:
        """Return a completion's choice with its text, after the prompt's text if it is echoed."""
        text = self._echo[prompt][0] if self._echo else ""
        logprobs = None if completion.logprobs is None else TextLogprobs(self._texts, len(text)).of(completion.logprobs)
        if self._echo and logprobs is not None:
            before = self._of_prompt(prompt, prompt_logprobs or ())
            logprobs = {name: [*before[name], *values] for name, values in logprobs.items()}
        end = {"finish_reason": REASONS[completion.finish_reason], **self._prompt_token_ids(prompt)}
        return {"text": text + completion.text, "logprobs": logprobs, **end}

    def _of_prompt(self, prompt: int, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the log-probabilities of an echoed prompt, by number; they are computed once."""
        if prompt not in self._echoed:
            text, first = self._echo[prompt]
            self._echoed[prompt] = TextLogprobs(self._texts).of_prompt(first, entries, text)
        return self._echoed[prompt]


class ChatResponse(ResponseBuilder):
    """The response of `/v1/chat/completions`. Tool calls and reasoning are taken out of the text."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, request_id: str, model: str, texts: TokenTexts, extras: Extras, parser: Callable[[], MessageParser]
    ) -> None:
        """Take `parser`, which makes the parser of a choice."""
        super().__init__(request_id, model, texts, extras)
        self._parser = parser
        self._parsers: defaultdict[int, MessageParser] = defaultdict(parser)
        self._known: Counter[int] = Counter()  # number of calls of each choice so far

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole response, with the token ids of the prompt if requested."""
        return {**super().whole(completions), **self._prompt_token_ids(0)}

    def start(
        self,
        choice: int,
        prompt: int,
        prompt_logprobs: Iterable[TokenLogprobs] | None,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        """Return the first chunk of choice number `choice`, which says that the role is the assistant's."""
        chunk = self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
        return [{**chunk, **self._prompt_token_ids(prompt)}]

    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:
        """Return a chunk of new text and whole calls; an empty list if there is nothing to report."""
        delta = self._delta(choice, self._parsers[choice].push(event.text))
        attention = _attention_of_tokens(event)
        if not delta and not event.logprobs and not self._extras.token_ids and not attention:
            return []
        logprobs = None if event.logprobs is None else chat_logprobs(self._texts, event.logprobs)
        text = {"delta": delta or {"content": ""}, **attention}
        return [self._chunk(choice, text, logprobs, token_ids=event.token_ids)]

    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:
        """Return the text that the parser held back, and the chunk with the finish reason."""
        rest = self._delta(choice, self._parsers[choice].end(cut=event.reason is not FinishReason.STOP))
        chunks = [self._chunk(choice, {"delta": rest})] if rest else []
        text = {"delta": {}, **_attention(event.attention)}
        reason = _reason(event.reason, calls=self._known[choice] > 0)
        return [*chunks, self._chunk(choice, text, None, reason, event.matched)]

    def _delta(self, choice: int, parts: MessageParts) -> dict[str, Any]:
        """Return the new part of a message; empty if there is nothing new."""
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
        """Return a completion's choice: a message with text, thoughts and tool calls."""
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
    """Return reasoning under the name that most clients know, and under vLLM's newer name."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as OpenAI's JSON object."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(reason: FinishReason, *, calls: bool) -> str:
    """Return OpenAI's finish reason; `calls` says whether there are tool calls."""
    return "tool_calls" if calls and reason is FinishReason.STOP else REASONS[reason]


def _attention(summary: AttentionSummary | None) -> dict[str, Any]:
    """Return the field `attention_stats` of a choice, if requested, with the names of `sharp.v1`."""
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
    """Return the field `attention_stats` of a chunk, if requested: H / ln n [tokens][layers][heads] of its tokens."""
    found = event.attention
    if found is None:
        return {}
    entropy = json_numbers(found.entropy.astype(np.float64).round(DIGITS))
    return {"attention_stats": {"positions": found.positions.tolist(), "normalized_entropy": entropy}}


def usage_of(prompts: Iterable[Usage], completions: Iterable[Usage]) -> dict[str, Any]:
    """Return the field `usage`. Each prompt counts once, however many completions it has."""
    prompts = tuple(prompts)
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(usage.completion_tokens for usage in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
    }
