"""The response of Anthropic's Messages API, and its events."""

import json
from typing import Any

from sharp.serving.api.events import FinishReason, Usage
from sharp.serving.frontends.http.parts_response import REASONING, PartsResponse
from sharp.serving.text.tool_calls import ToolCall

ERRORS = {
    "invalid_request_error": "invalid_request_error",
    "rate_limit_error": "rate_limit_error",
    "server_error": "api_error",
}
CODES = {"model_not_found": "not_found_error", "invalid_api_key": "authentication_error"}


class MessagesResponse(PartsResponse):
    """The builder of the response of Anthropic's `/v1/messages`: a message whose content is a list of blocks."""

    prefix = "msg"

    def _message(self, usage: dict[str, int], reason: str | None = None, stop: str | None = None) -> dict[str, Any]:
        """Return the message as a JSON object with all parts so far; `usage` has counts of tokens by name.

        `reason` is Anthropic's stop reason, and `stop` the stop string that matched; both are None while it runs.
        """
        return {
            "id": self._base["id"],
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.parts,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def opening(self) -> list[dict[str, Any]]:
        """Return the event `message_start`, with the message and the usage of its prompt."""
        return [
            {
                "type": "message_start",
                "message": self._message({"input_tokens": self.prompt_tokens, "output_tokens": 0}),
            }
        ]

    def _index(self) -> dict[str, int]:
        """Return the field with the index of the current part."""
        return {"index": len(self.parts)}

    def part_begins(self, kind: str) -> list[dict[str, Any]]:
        """Return the event `content_block_start` of a block; `kind` is "reasoning" or "text"."""
        return [{"type": "content_block_start", **self._index(), "content_block": _block(kind, "")}]

    def part_grows(self, kind: str, text: str) -> dict[str, Any]:
        """Return the event `content_block_delta` that appends `text` to the open block."""
        name = "thinking" if kind == REASONING else "text"
        return {"type": "content_block_delta", **self._index(), "delta": {"type": f"{name}_delta", name: text}}

    def part_ends(self, kind: str, text: str) -> list[dict[str, Any]]:
        """End the open block of reasoning or text, `text` in all, and return the event `content_block_stop`."""
        event = {"type": "content_block_stop", **self._index()}
        self.parts.append(_block(kind, text))
        return [event]

    def tool_call(self, call: ToolCall) -> list[dict[str, Any]]:
        """Append a block `tool_use` to the message's content, and return the events of the whole block."""
        block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        events = [
            {"type": "content_block_start", **self._index(), "content_block": block},
            {"type": "content_block_delta", **self._index(), "delta": delta},
            {"type": "content_block_stop", **self._index()},
        ]
        self.parts.append({**block, "input": _object(call.arguments)})
        return events

    def _end_of(self, reason: FinishReason, matched: str | int | None) -> tuple[str, str | None]:
        """Return Anthropic's stop reason, and the stop string that matched or None."""
        if reason is not FinishReason.STOP:
            return "max_tokens", None
        if any(part["type"] == "tool_use" for part in self.parts):
            return "tool_use", None
        return ("stop_sequence", matched) if isinstance(matched, str) else ("end_turn", None)

    def closing(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> list[dict[str, Any]]:
        """Return the events `message_delta`, with the stop reason and the usage, and `message_stop`.

        `matched` is the stop string or stop token that ended the completion, None for another reason.
        """
        why, stop = self._end_of(reason, matched)
        delta = {"stop_reason": why, "stop_sequence": stop}
        return [{"type": "message_delta", "delta": delta, "usage": _counted(usage)}, {"type": "message_stop"}]

    def body(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> dict[str, Any]:
        """Return the JSON body of a response that is no stream: the whole message.

        `matched` is the stop string or stop token that ended the completion, None for another reason.
        """
        return self._message(_counted(usage), *self._end_of(reason, matched))

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the event of an error, from the body of an error response."""
        return error_event(body)


def error_event(body: dict[str, Any]) -> dict[str, Any]:
    """Return an error as Anthropic's API writes it, from the body of one of OpenAI's."""
    error = body["error"]
    kind = CODES.get(error["code"] or "", ERRORS.get(error["type"], "api_error"))
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def _counted(usage: Usage) -> dict[str, int]:
    """Return the counts of tokens under Anthropic's names."""
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _block(kind: str, text: str) -> dict[str, Any]:
    """Return the content block of a thought or of text."""
    return (
        {"type": "thinking", "thinking": text, "signature": ""} if kind == REASONING else {"type": "text", "text": text}
    )


def _object(text: str) -> Any:
    """Return the JSON value of a text; an empty object if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}
