"""JSON that lets other threads run while it is written."""

import json
from typing import Any

BODY_LEVELS = 5  # body, choices, choice, logprobs, their lists


def compact_json(value: Any, levels: int = BODY_LEVELS) -> str:
    """Compact JSON.

    So many `levels` are written part by part: inside one call of the encoder no other thread runs, and of a large body
    that call would take as long as many steps.
    """
    if levels and isinstance(value, dict):
        return (
            "{" + ",".join(f"{json.dumps(name)}:{compact_json(one, levels - 1)}" for name, one in value.items()) + "}"
        )
    if levels and isinstance(value, list):
        return "[" + ",".join(compact_json(one, levels - 1) for one in value) + "]"
    return json.dumps(value, separators=(",", ":"))
