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
    """A message whose parts are blocks of content."""

    prefix = "msg"

    def _message(self, usage: dict[str, int], reason: str | None = None, stop: str | None = None) -> dict[str, Any]:
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
        """See `PartsResponse`."""
        return [
            {
                "type": "message_start",
                "message": self._message({"input_tokens": self.prompt_tokens, "output_tokens": 0}),
            }
        ]

    def _index(self) -> dict[str, int]:
        return {"index": len(self.parts)}

    def part_begins(self, kind: str) -> list[dict[str, Any]]:
        """See `PartsResponse`."""
        return [{"type": "content_block_start", **self._index(), "content_block": _block(kind, "")}]

    def part_grows(self, kind: str, text: str) -> dict[str, Any]:
        """See `PartsResponse`."""
        name = "thinking" if kind == REASONING else "text"
        return {"type": "content_block_delta", **self._index(), "delta": {"type": f"{name}_delta", name: text}}

    def part_ends(self, kind: str, text: str) -> list[dict[str, Any]]:
        """See `PartsResponse`."""
        event = {"type": "content_block_stop", **self._index()}
        self.parts.append(_block(kind, text))
        return [event]

    def tool_call(self, call: ToolCall) -> list[dict[str, Any]]:
        """See `PartsResponse`."""
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
        if reason is not FinishReason.STOP:
            return "max_tokens", None
        if any(part["type"] == "tool_use" for part in self.parts):
            return "tool_use", None
        return ("stop_sequence", matched) if isinstance(matched, str) else ("end_turn", None)

    def closing(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> list[dict[str, Any]]:
        """See `PartsResponse`."""
        why, stop = self._end_of(reason, matched)
        delta = {"stop_reason": why, "stop_sequence": stop}
        return [{"type": "message_delta", "delta": delta, "usage": _counted(usage)}, {"type": "message_stop"}]

    def body(self, reason: FinishReason, matched: str | int | None, usage: Usage) -> dict[str, Any]:
        """See `PartsResponse`."""
        return self._message(_counted(usage), *self._end_of(reason, matched))

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        """See `ResponseBuilder`."""
        return error_event(body)


def error_event(body: dict[str, Any]) -> dict[str, Any]:
    """An error as Anthropic writes it, of the body of one of OpenAI's."""
    error = body["error"]
    kind = CODES.get(error["code"] or "", ERRORS.get(error["type"], "api_error"))
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def _counted(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _block(kind: str, text: str) -> dict[str, Any]:
    return (
        {"type": "thinking", "thinking": text, "signature": ""} if kind == REASONING else {"type": "text", "text": text}
    )


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}
