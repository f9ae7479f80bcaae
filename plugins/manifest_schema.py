"""`python -m sharp.plugins.manifest_schema` writes the JSON Schema of `sharp.json`, for tools without Sharp."""

import json
from pathlib import Path

from sharp.plugins.manifest import FORMAT_VERSION, Manifest

SCHEMA_FILE = Path(__file__).parent / "sharp.schema.json"


def manifest_schema() -> str:
    """The schema as text. Fields that it does not know are allowed: a newer minor version may have more."""
    schema = Manifest.model_json_schema(mode="serialization")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"sharp.json, format version {FORMAT_VERSION}",
        "description": "The manifest of a model folder that sharp-export wrote.",
    }
    return json.dumps({**schema, **head}, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(manifest_schema(), encoding="utf-8")
