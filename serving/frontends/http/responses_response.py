"""The response of OpenAI's Responses API, and its events."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from sharp.serving.api.events import FinishReason, Usage
from sharp.serving.frontends.http.parts_response import REASONING, PartsResponse
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.text.chat_forms import MessageParser
from sharp.serving.text.tool_calls import ToolCall

# The fields of a request that its response repeats, with their values if the request does not set them.
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}
# Fields of a request that the response has only if the request has them.
REPEATED_IF_SET = ("user",)


class ResponsesResponse(PartsResponse):
    """The builder of the response of OpenAI's `/v1/responses`: a list of items (reasoning, message, function call)."""

    prefix = "resp"

    def __init__(
        self,
        request_id: str,
        model: str,
        texts: TokenTexts,
        parser: Callable[[], MessageParser],
        prompt_tokens: int,
        settings: Mapping[str, Any],
    ) -> None:
        """Take the fields of the request as `settings`."""
        super().__init__(request_id, model, texts, parser, prompt_tokens)
        self._id = f"resp_{request_id}"
        self._created = int(time.time())
        self._settings = {
            name: unset if (value := settings.get(name)) is None else value for name, unset in REPEATED.items()
        } | {name: settings[name] for name in REPEATED_IF_SET if settings.get(name) is not None}
        text = self._settings["text"]
        stated = {name: value for name, value in (text.get("format") or {}).items() if value is not None}
        self._settings["text"] = {**text, "format": stated or REPEATED["text"]["format"]}
        self._numbers = 0
        self._items = 0

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the stream of type `kind`, with the next sequence number."""
        self._numbers += 1
        return {"type": kind, "sequence_number": self._numbers - 1, **fields}

    def _response(self, status: str, usage: dict[str, Any] | None, incomplete: str | None = None) -> dict[str, Any]:
        """Return the response object; `incomplete` is the reason for which it is incomplete, None if complete."""
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "model": self.model,
            "output": self.parts,
            "store": False,
            "usage": usage,
            **self._settings,
        }

    def opening(self) -> list[dict[str, Any]]:
        """Return the events `response.created` and `response.in_progress`."""
        response = self._response("in_progress", None)
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def _position(self) -> dict[str, Any]:
        """Return the fields that say where in the output the current part is."""
        return {"item_id": self._item_id, "output_index": len(self.parts), "content_index": 0}

    def _new_id(self, prefix: str) -> str:
        """Return a new id for an item of the output, such as "msg_..." for the prefix "msg"."""
        self._items += 1
        self._item_id = f"{prefix}_{self._id.removeprefix('resp_')}_{self._items}"
        return self._item_id

    def part_begins(self, kind: str) -> list[dict[str, Any]]:
        """Return the events that begin an item; `kind` is "reasoning" or "text" (a message)."""
        item = _item(kind, self._new_id("rs" if kind == REASONING else "msg"), "in_progress", None)
        return [
            self._event("response.output_item.added", output_index=len(self.parts), item=item),
            self._event("response.content_part.added", **self._position(), part=_content(kind, "")),
        ]

    def part_grows(self, kind: str, text: str) -> dict[str, Any]:
        """Return the event that appends `text` to the open item of reasoning or text."""
        logprobs: dict[str, Any] = {} if kind == REASONING else {"logprobs": []}
        return self._event(f"response.{_content_name(kind)}.delta", **self._position(), delta=text, **logprobs)

    def part_ends(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Append the open item of reasoning or text to the response's output, and return the events that end it."""
        logprobs: dict[str, Any] = {} if kind == REASONING else {"logprobs": []}
        item = _item(kind, self._item_id, "completed", text)
        events = [
            self._event(f"response.{_content_name(kind)}.done", **self._position(), text=text, **logprobs),
            self._event("response.content_part.done", **self._position(), part=_content(kind, text)),
            self._event("response.output_item.done", output_index=len(self.parts), item=item),
        ]
        self.parts.append(item)
        return events

    def tool_call(self, call: ToolCall) -> list[dict[str, Any]]:
        """Append an item `function_call` to the response's output, and return its events."""
        begun = {
            "id": self._new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": "",
        }
        item = {**begun, "status": "completed", "arguments": call.arguments}
        where = {"item_id": item["id"], "output_index": len(self.parts)}
        arguments = "response.function_call_arguments"
        events = [
            self._event("response.output_item.added", output_index=len(self.parts), item=begun),
            self._event(f"{arguments}.delta", **where, delta=call.arguments),
            self._event(f"{arguments}.done", **where, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=len(self.parts), item=item),
        ]
        self.parts.append(item)
        return events

    def closing(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> list[dict[str, Any]]:
        """Return the event `response.completed`, or `response.incomplete` for a completion that was cut off.

        `matched`, the stop string or stop token, is not reported.
        """
        response = self.body(reason, matched, usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def body(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> dict[str, Any]:  # noqa: ARG002
        """Return the JSON body of a response that is no stream, with output, status and usage."""
        complete = reason is FinishReason.STOP
        if not complete and self.parts and self.parts[-1].get("status"):
            self.parts[-1]["status"] = "incomplete"
        counted = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if complete:
            return self._response("completed", counted)
        return self._response("incomplete", counted, "max_output_tokens")

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the event of an error, from the body of an error response."""
        error = body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])


def _content_name(kind: str) -> str:
    """Return the name of a part's content: "reasoning_text" or "output_text"."""
    return "reasoning_text" if kind == REASONING else "output_text"


def _content(kind: str, text: str) -> dict[str, Any]:
    """Return the content object of a thought or of text."""
    more: dict[str, Any] = {} if kind == REASONING else {"annotations": [], "logprobs": []}
    return {"type": _content_name(kind), "text": text, **more}


def _item(kind: str, item_id: str, status: str, text: str | None) -> dict[str, Any]:
    """Return an item of the output as a JSON object: a message, or reasoning by its `kind`.

    `text` is None while the item has no content.
    """
    content = [] if text is None else [_content(kind, text)]
    if kind == REASONING:
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}
