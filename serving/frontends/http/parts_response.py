"""`PartsResponse`: responses that are a list of parts, thoughts, texts and calls, each with its own events."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sharp.serving.api.completion import Completion
from sharp.serving.api.events import Delta, Finished, FinishReason, TokenLogprobs, Usage
from sharp.serving.frontends.http.compact_json import compact_json
from sharp.serving.frontends.http.openai_response import Extras, ResponseBuilder
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.text.chat_forms import MessageParser, MessageParts
from sharp.serving.text.tool_calls import ToolCall

REASONING, TEXT = "reasoning", "text"


class PartsResponse(ResponseBuilder):
    """Of one completion. Events are dictionaries with a `type`."""

    whole_object = chunk_object = ""
    last_frame = ""

    def __init__(
        self, request_id: str, model: str, texts: TokenTexts, parser: Callable[[], MessageParser], prompt_tokens: int
    ) -> None:
        """`parser` makes what takes the completion apart."""
        super().__init__(request_id, model, texts, Extras())
        self.model = model
        self.prompt_tokens = prompt_tokens
        self._parser = parser()
        self._open: str | None = None  # the kind of the part that grows
        self.text = ""  # of that part
        self.parts: list[dict[str, Any]] = []  # complete ones

    def frame(self, data: dict[str, Any]) -> str:
        """See `ResponseBuilder`."""
        return f"event: {data['type']}\ndata: {compact_json(data, 0)}\n\n"

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """See `ResponseBuilder`."""
        (completion,) = completions
        self._add(self._parser.push(completion.text))
        self._end(completion.finish_reason)
        return self.body(completion.finish_reason, completion.matched, completion.usage)

    def start(
        self,
        choice: int,  # noqa: ARG002
        prompt: int,  # noqa: ARG002
        prompt_logprobs: Iterable[TokenLogprobs] | None,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        """See `ResponseBuilder`."""
        return self.opening()

    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:  # noqa: ARG002
        """See `ResponseBuilder`."""
        return self._add(self._parser.push(event.text))

    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:  # noqa: ARG002
        """See `ResponseBuilder`."""
        return [*self._end(event.reason), *self.closing(event.reason, event.matched, event.usage)]

    def _add(self, parts: MessageParts) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for kind, text in ((REASONING, parts.reasoning), (TEXT, parts.content)):
            if not text:
                continue
            if self._open != kind:
                events += self._close()
                self._open = kind
                events += self.part_begins(kind)
            self.text += text
            events.append(self.part_grows(kind, text))
        for call in parts.calls:
            events += [*self._close(), *self.tool_call(call)]
        return events

    def _end(self, reason: FinishReason) -> list[dict[str, Any]]:
        return [*self._add(self._parser.end(cut=reason is not FinishReason.STOP)), *self._close()]

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        events = self.part_ends(self._open, self.text)
        self._open, self.text = None, ""
        return events

    def _whole(
        self, completion: Completion, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None
    ) -> dict[str, Any]:
        raise NotImplementedError("`whole` is another here")

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """The first events."""

    @abstractmethod
    def part_begins(self, kind: str) -> list[dict[str, Any]]:
        """The events of a new thought or text."""

    @abstractmethod
    def part_grows(self, kind: str, text: str) -> dict[str, Any]:
        """The event of more of it."""

    @abstractmethod
    def part_ends(self, kind: str, text: str) -> list[dict[str, Any]]:
        """The events of its end; it is added to `parts`."""

    @abstractmethod
    def tool_call(self, call: ToolCall) -> list[dict[str, Any]]:
        """The events of a call, which comes as a whole; it is added to `parts`."""

    @abstractmethod
    def closing(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> list[dict[str, Any]]:
        """The last events."""

    @abstractmethod
    def body(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> dict[str, Any]:
        """The body of a response that is no stream."""
