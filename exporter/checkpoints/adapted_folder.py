"""What the folder of an adapted model says of its norm, before the model is read."""

import json
from pathlib import Path

from sharp.models.adapted_model import MODEL_TYPE, read_adapted_norm


def recorded_norm(path: Path) -> str | None:
    """The norm that the `config.json` of an adapted model names; None for every other checkpoint."""
    try:
        content = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("model_type") != MODEL_TYPE:
        return None
    return read_adapted_norm(content.get("sharp")).norm
