"""The JSON Schema of `sharp.json`, for tools without Sharp; `python -m sharp.plugins.op.generate` writes it."""

import json
from pathlib import Path

from sharp.core.manifest import FORMAT_VERSION, Manifest

SCHEMA_FILE = Path(__file__).parent / "sharp.schema.json"


def manifest_schema() -> str:
    """Return the JSON Schema of `sharp.json` as text.

    The schema allows unknown fields, because a newer minor version may have more fields.
    """
    schema = Manifest.model_json_schema(mode="serialization")
    head = {
        "$comment": "Generated from core/manifest.py by `python -m sharp.plugins.op.generate`: do not edit.",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"sharp.json, format version {FORMAT_VERSION}",
        "description": "The manifest of a model folder that sharp-export wrote.",
    }
    return json.dumps({**head, **schema, **head}, indent=2) + "\n"
