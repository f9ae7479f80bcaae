"""What onnxruntime-genai wants beside a contiguous model: `genai_config.json`, and a tokenizer that it can open."""

import json
from pathlib import Path
from typing import Any

from sharp.exporter.forms.contiguous.model import PAST, PRESENT
from sharp.plugins.manifest import Manifest

GENAI_CONFIG = "genai_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


def write_genai_config(folder: Path, manifest: Manifest) -> None:
    """Describe the decoder of `folder` to onnxruntime-genai 0.18.

    It runs the function body, which a folder of `--target tensorrt` has not, unless our library is named in
    `session_options.custom_ops_library`, a path of the machine that runs it: see `with_kernels`.
    """
    config = genai_config(manifest)
    (folder / GENAI_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if manifest.tokenizer.file is not None and not (folder / TOKENIZER_CONFIG).exists():
        # Without the file it opens no tokenizer; the class says which of its kinds tokenizer.json is.
        content = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        (folder / TOKENIZER_CONFIG).write_text(content + "\n", encoding="utf-8")


def genai_config(manifest: Manifest) -> dict[str, Any]:
    """The content of `genai_config.json`; `decoder` is genai's type for any causal model."""
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
        # The graph concatenates; a buffer that past and present share would have to be of full length.
        "search": {"do_sample": False, "max_length": manifest.max_context, "past_present_share_buffer": False},
    }


def with_kernels(library: str) -> str:
    """What `onnxruntime_genai.Config.overlay` takes to run attention in the library at this path."""
    return json.dumps({"model": {"decoder": {"session_options": {"custom_ops_library": library}}}})
