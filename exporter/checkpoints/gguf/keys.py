"""The check of the keys and tensors of a GGUF file that an export does not use, and the reasons for harmless ones."""

from collections.abc import Sequence
from dataclasses import replace

from sharp.exporter.checkpoints.gguf.file import GgufFile
from sharp.exporter.sources.unknown_keys import UnusedKeys, check_keys

SAMPLING = "general.sampling."
DESCRIBES = "describes the file or where it comes from"
HARMLESS_KEYS = {
    **dict.fromkeys(
        (
            *("general.type", "general.name", "general.basename", "general.author", "general.version", "general.tags"),
            *("general.organization", "general.finetune", "general.description", "general.quantized_by", "general.url"),
            *("general.size_label", "general.license*", "general.doi", "general.uuid", "general.repo_url"),
            *("general.source.*", "general.base_model.*", "general.dataset.*", "general.datasets", "general.languages"),
            *("general.file_type", "general.quantization_version", "general.alignment", "general.endianess"),
            *("quantize.imatrix.*", "split.*", "general.base_models*"),
        ),
        DESCRIBES,
    ),
    **dict.fromkeys(
        ("tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces"),
        "llama.cpp reads it for tokenizers of T5 only",
    ),
    "tokenizer.ggml.scores": "the merges of a byte-level tokenizer say it all",
    "tokenizer.ggml.merges": "the scores of a SentencePiece tokenizer say it all",
    "tokenizer.ggml.pre": "llama.cpp reads it for byte-level tokenizers only",
    "tokenizer.ggml.add_space_prefix": "llama.cpp reads it for SentencePiece tokenizers only",
    **dict.fromkeys(
        ("tokenizer.ggml.seperator_token_id", "tokenizer.ggml.cls_token_id", "tokenizer.ggml.mask_token_id"),
        "no text of a decoder begins or ends with it",
    ),
    "tokenizer.ggml.token_type_count": "says how many kinds of segments an encoder has",
    "tokenizer.huggingface.json": "llama.cpp does not read it",
    "*.rope.scaling.finetuned": "says that the model was trained with the scaling, which applies in any case",
    "*.tensor_data_layout": "llama.cpp does not read it",
}
HARMLESS_TENSORS = {"blk.*.attn_rot_embd*": "angles of RoPE, which are computed"}


def check_unused(file: GgufFile, ignore: Sequence[str]) -> tuple[UnusedKeys, ...]:
    """Return the metadata keys and the tensors of `file`, after it was read, that the export did not use.

    Raises:
        InputError: a key or tensor may change numbers, and the user did not ignore it.
    """
    unused = file.unused_keys()
    # The report names settings of samplers that Sharp does not have, because completions are sampled without them.
    sampling = tuple(name for name, value in unused.items() if name.startswith(SAMPLING) and value)
    unused = {name: value for name, value in unused.items() if not name.startswith(SAMPLING)}
    keys = check_keys(file.path, "metadata", unused, harmless=HARMLESS_KEYS, ignore=ignore)
    keys = replace(keys, unknown=(*keys.unknown, *sampling))
    tensors = check_keys(
        file.path,
        "tensors",
        file.tensors,
        tensors=True,
        used=file.used_tensors,
        harmless=HARMLESS_TENSORS,
        ignore=ignore,
    )
    return keys, tensors
