"""`PartsResponse`: responses made of parts (reasoning, texts and calls), each with events of its own."""

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
    """The builder of a response that is a list of parts (reasoning, text, tool calls), for one completion.

    `/v1/messages` and `/v1/responses` have such responses. The parser splits the completion into parts, and subclasses
    write a part in their API's form. `parts` has the complete parts. Events of a stream are dictionaries with a `type`.
    """

    whole_object = chunk_object = ""
    last_frame = ""

    def __init__(
        self, request_id: str, model: str, texts: TokenTexts, parser: Callable[[], MessageParser], prompt_tokens: int
    ) -> None:
        """Call `parser` once, for the parser that splits the completion into reasoning, text and tool calls."""
        super().__init__(request_id, model, texts, Extras())
        self.model = model
        self.prompt_tokens = prompt_tokens
        self._parser = parser()
        self._open: str | None = None  # the kind of the part that grows
        self.text = ""  # of the part that grows
        self.parts: list[dict[str, Any]] = []  # the complete parts

    def frame(self, data: dict[str, Any]) -> str:
        """Return an event as the text of a server-sent event, whose name is the event's `type`."""
        return f"event: {data['type']}\ndata: {compact_json(data, 0)}\n\n"

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a response that is no stream, for the only completion."""
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
        """Return the events with which a stream begins, before any part; the arguments are not used."""
        return self.opening()

    def delta(self, choice: int, event: Delta) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the events of new text: of parts that begin, grow or end in it."""
        return self._add(self._parser.push(event.text))

    def finished(self, choice: int, event: Finished) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the events of the text that the parser held back, and the last events of the response."""
        return [*self._end(event.reason), *self.closing(event.reason, event.matched, event.usage)]

    def _add(self, parts: MessageParts) -> list[dict[str, Any]]:
        """Return the stream's events for new thoughts, text and calls; a part ends where another kind begins."""
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
        """Return the stream's events for the end of a completion: held text, and the end of the open part."""
        return [*self._add(self._parser.end(cut=reason is not FinishReason.STOP)), *self._close()]

    def _close(self) -> list[dict[str, Any]]:
        """Return the events that end the open part; empty if none is open."""
        if self._open is None:
            return []
        events = self.part_ends(self._open, self.text)
        self._open, self.text = None, ""
        return events

    def _whole(
        self, completion: Completion, prompt: int, prompt_logprobs: Iterable[TokenLogprobs] | None
    ) -> dict[str, Any]:
        """Raise NotImplementedError, because `whole` of these responses does not build choices."""
        raise NotImplementedError("`whole` is another here")

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Return the events with which a stream begins, before any part."""

    @abstractmethod
    def part_begins(self, kind: str) -> list[dict[str, Any]]:
        """Return the events that begin a part; `kind` is "reasoning" or "text"."""

    @abstractmethod
    def part_grows(self, kind: str, text: str) -> dict[str, Any]:
        """Return the event that appends `text` to the part that is open, of the kind "reasoning" or "text"."""

    @abstractmethod
    def part_ends(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Append the open part, whose whole text is `text`, to `parts`, and return the events that end it.

        `kind` is "reasoning" or "text".
        """

    @abstractmethod
    def tool_call(self, call: ToolCall) -> list[dict[str, Any]]:
        """Append a tool call, which comes as a whole and not in pieces, to `parts`, and return its events."""

    @abstractmethod
    def closing(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> list[dict[str, Any]]:
        """Return the events with which a stream ends, after all parts.

        `matched` is the stop string or stop token that ended the completion, None for another reason.
        """

    @abstractmethod
    def body(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> dict[str, Any]:
        """Return the JSON body of a response that is no stream, with `parts` in it.

        `matched` is the stop string or stop token that ended the completion, None for another reason.
        """
