"""JSON that lets other threads run while it is written."""

import json
from typing import Any

BODY_LEVELS = 5  # body, choices, choice, logprobs, their lists


def compact_json(value: Any, levels: int = BODY_LEVELS) -> str:
    """Return compact JSON.

    The outer `levels` are written part by part. Inside one call of the encoder no other thread runs, and one call for a
    large body would take as long as many steps of the engine.
    """
    if levels and isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{json.dumps(name)}:{compact_json(entry, levels - 1)}" for name, entry in value.items())
            + "}"
        )
    if levels and isinstance(value, list):
        return "[" + ",".join(compact_json(entry, levels - 1) for entry in value) + "]"
    return json.dumps(value, separators=(",", ":"))
