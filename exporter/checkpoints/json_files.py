"""Checks of the JSON files of a Hugging Face folder, before transformers reads them with less helpful errors."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.architectures import ARCHITECTURES

MARK = b"\xef\xbb\xbf"
WHOLE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions"),
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
POSITIVE = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rope_theta"),
    "sliding_window",
)


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, which must exist.

    Raises:
        InputError: the file is no JSON object, begins with a byte order mark, or has a key twice.
        OSError: the file is missing or cannot be read.
    """
    raw = file.read_bytes()
    if raw.startswith(MARK):
        raise InputError(f"{file} begins with a byte order mark; save it as UTF-8 without one")

    twice: list[str] = []

    def noted(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """Return the pairs of a JSON object as a dict, and note names that stand twice."""
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice.extend(name for name in found if names.count(name) > 1)
        return found

    try:
        content = json.loads(raw, object_pairs_hook=noted)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is damaged: it is no JSON; copy the checkpoint again") from error
    if twice:
        raise InputError(f"{file} has the key {twice[0]!r} twice; leave one of them out")
    if not isinstance(content, dict):
        raise InputError(f"{file} is damaged: it is no JSON object; copy the checkpoint again")
    return content


def check_config_file(path: Path) -> None:
    """Refuse a `config.json` in folder `path` with values that no model can have, or of a model of several parts.

    Raises:
        InputError: the file has such a value, which the message names, or cannot be read.
    """
    file = path / "config.json"
    content = read_json(file)
    if "text_config" in content and content.get("model_type") in ARCHITECTURES:
        raise InputError(
            f"{file} has text_config, that of one part of a larger model, beside model_type {content['model_type']}; "
            "save the text model in a folder of its own first"
        )
    rope = [content.get(name) for name in ("rope_scaling", "rope_parameters")]
    for part in (content, *(entry for entry in rope if isinstance(entry, dict))):
        for name, value in part.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{file} has {name} {value}, which is no finite number; correct it")
            if name in WHOLE and value is not None and type(value) is not int:
                raise InputError(f"{file} has {name} {value!r}, which must be a whole number; correct it")
            off = name == "sliding_window" and content.get("use_sliding_window") is False
            if name in POSITIVE and isinstance(value, int | float) and value <= 0 and not off:
                raise InputError(f"{file} has {name} {value}, which must be above 0; correct it")
    _check_tokens(file, content)


def check_generation_file(path: Path) -> None:
    """Refuse a `generation_config.json` in folder `path` that transformers cannot read; the file may be missing.

    Raises:
        InputError: transformers cannot read the file; the message names it.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return
    content = read_json(file)
    _check_tokens(file, content)
    try:
        GenerationConfig(**content)
    except Exception as error:  # transformers checks some settings against others, and may raise any error
        text = " ".join(str(error).split())[:200]
        raise InputError(f"{file} cannot be read: {text}; correct the setting, or leave it out") from error


def _check_tokens(file: Path, content: Mapping[str, Any]) -> None:
    """Check that a config's special tokens (`TOKENS`) are integers, lists of them, or absent; else raise InputError."""
    for name in TOKENS:
        given = content.get(name)
        for token in given if isinstance(given, list) else [given]:
            if token is not None and type(token) is not int:
                raise InputError(f"{file} has {name} {token!r}, which must be the number of a token; correct it")
