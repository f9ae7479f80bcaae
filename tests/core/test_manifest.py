"""`sharp.json`: the JSON Schema in the repository is current, and invalid manifests are refused."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, ValidationError

from sharp.core.errors import InputError
from sharp.core.manifest import FORMAT_VERSION, Manifest, Norm, SourceRecord, read_manifest
from sharp.core.manifest_schema import SCHEMA_FILE, manifest_schema


def manifest(**changes: object) -> Manifest:
    facts: dict[str, object] = {
        "sharp_version": "1",
        "name": "tiny",
        "source": SourceRecord(name="tiny", architecture="SharpForCausalLM", sha256="00"),
        "opset": 23,
        "layers": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "value_dim": 8,
        "vocab_size": 257,
        "max_context": 64,
        "trained_context": 64,
        "positions": "rope",
        "norm": Norm(name="ssa", normalizer="ssa", trained=True),
    }
    return Manifest(**{**facts, **changes})  # type: ignore[arg-type]


def test_the_schema_in_the_repository_is_current():
    assert SCHEMA_FILE.read_text() == manifest_schema(), "run: python -m sharp.plugins.op.generate"


def test_the_schema_takes_what_is_written_and_refuses_what_is_not():
    schema = Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))
    content = json.loads(manifest().model_dump_json())
    schema.validate(content)
    schema.validate({**content, "a_field_of_a_newer_minor_version": 1})
    for wrong in ({"layers": 0}, {"positions": "sideways"}, {"verified": "yes"}, {"verification": {"passed": 7}}):
        with pytest.raises(ValidationError):
            schema.validate({**content, **wrong})


def test_a_newer_major_version_is_refused_by_name(tmp_path: Path):
    newer = f"{int(FORMAT_VERSION.split('.')[0]) + 1}.0"
    (tmp_path / "sharp.json").write_text(json.dumps({"format_version": newer, "layers": "of another kind"}))
    with pytest.raises(InputError, match=rf"format version {newer}, this Sharp reads {FORMAT_VERSION}; upgrade Sharp"):
        read_manifest(tmp_path)


def test_a_newer_minor_version_may_have_more_fields(tmp_path: Path):
    major = FORMAT_VERSION.split(".")[0]
    content = json.loads(manifest().model_dump_json()) | {"format_version": f"{major}.99", "more": {"of": "it"}}
    (tmp_path / "sharp.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"'model\.onnx' is missing"):  # the manifest itself is valid
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../model.onnx", "loop", "model\0.onnx"])
@pytest.mark.parametrize("field", ["model_file", "tokenizer"])
def test_a_file_that_does_not_lie_in_the_folder_is_refused(tmp_path: Path, field: str, name: str):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "model.onnx").touch()
    named = name if field == "model_file" else {"file": name}
    content = json.loads(manifest().model_dump_json()) | {field: named}
    (tmp_path / "sharp.json").write_text(json.dumps(content))
    # Since Python 3.13, a link to itself counts as a missing file.
    also = "|'loop' is missing" if name == "loop" else ""
    with pytest.raises(InputError, match=f"which is outside the model folder{also}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": None}, "format_version: "),
        ({"layers": 10**9}, "layers: Input should be less than or equal to 10000"),
        ({"max_context": 10**20}, "max_context: Input should be less than 2147483648"),
        ({"windows": [10**20] * 2}, "windows.0: Input should be less than 2147483648"),
        ({"tokenizer": {"eos_token_ids": [-1]}}, "tokenizer.eos_token_ids.0: Input should be greater"),
        ({"q_heads": 7}, r"q_heads is 7, but must be a multiple of kv_heads \(2\)"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes, message):
    content = json.loads(manifest().model_dump_json()) | changes
    (tmp_path / "sharp.json").write_text(json.dumps({name: value for name, value in content.items() if value}))
    with pytest.raises(InputError, match=f"is not a valid manifest: {message}"):
        read_manifest(tmp_path)
