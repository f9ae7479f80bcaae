"""The files that onnxruntime-genai requires beside a contiguous model: `genai_config.json` and tokenizer settings."""

import json
from pathlib import Path
from typing import Any

from sharp.core.manifest import Manifest
from sharp.exporter.forms.contiguous.model import PAST, PRESENT

GENAI_CONFIG = "genai_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


def write_genai_config(folder: Path, manifest: Manifest) -> None:
    """Write `genai_config.json`, which describes the decoder in `folder` to onnxruntime-genai 0.18.

    onnxruntime-genai runs the function body of attention, which a folder of `--target tensorrt` does not have. It runs
    our kernels if `session_options.custom_ops_library` names our library, whose path depends on the machine
    (`with_kernels`). A folder with a tokenizer also gets a `tokenizer_config.json`, if it has none.
    """
    config = genai_config(manifest)
    (folder / GENAI_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if manifest.tokenizer.file is not None and not (folder / TOKENIZER_CONFIG).exists():
        # onnxruntime-genai opens no tokenizer without this file; the class says of which kind tokenizer.json is.
        content = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        (folder / TOKENIZER_CONFIG).write_text(content + "\n", encoding="utf-8")


def genai_config(manifest: Manifest) -> dict[str, Any]:
    """Return the content of `genai_config.json`. `decoder` is onnxruntime-genai's type for any causal model."""
    ids: dict[str, Any] = {}
    if manifest.tokenizer.bos_token_id is not None:
        ids["bos_token_id"] = manifest.tokenizer.bos_token_id
    if manifest.tokenizer.eos_token_ids:
        ids["eos_token_id"] = list(manifest.tokenizer.eos_token_ids)
        ids["pad_token_id"] = manifest.tokenizer.eos_token_ids[0]
    return {
        "model": {
            "type": "decoder",
            "vocab_size": manifest.vocab_size,
            "context_length": manifest.max_context,
            **ids,
            "decoder": {
                "filename": manifest.model_file,
                "session_options": {"provider_options": []},
                "head_size": manifest.head_dim,
                "hidden_size": manifest.q_heads * manifest.head_dim,
                "num_attention_heads": manifest.q_heads,
                "num_hidden_layers": manifest.layers,
                "num_key_value_heads": manifest.kv_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "past_key_names": PAST.format(layer="%d", part="key"),
                    "past_value_names": PAST.format(layer="%d", part="value"),
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": PRESENT.format(layer="%d", part="key"),
                    "present_value_names": PRESENT.format(layer="%d", part="value"),
                },
            },
        },
        # The graph concatenates keys. If past and present shared a buffer, it would need the full length.
        "search": {"do_sample": False, "max_length": manifest.max_context, "past_present_share_buffer": False},
    }


def with_kernels(library: str) -> str:
    """Return the argument of `onnxruntime_genai.Config.overlay` that makes attention run in `library`, a path."""
    return json.dumps({"model": {"decoder": {"session_options": {"custom_ops_library": library}}}})
