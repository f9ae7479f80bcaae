"""Checks that the exported tokenizer does what the keys of `tokenizer_config.json` say.

A server reads `tokenizer.json` alone, so it does not know keys that transformers obeys in Python code.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.hugging_face_tokenizer import stored_tokenizer
from sharp.exporter.checkpoints.json_files import read_json
from sharp.exporter.sources.unknown_keys import IGNORE, UnusedKeys, check_keys, matches

FILE = "tokenizer_config.json"
KNOWN = {
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case"), "checked by its effect"),
    **dict.fromkeys(("*_token", "*_token_id", "*_tokens", "*_tokens_*", "*_token_type_id"), "names of special tokens"),
    **dict.fromkeys(("tokenizer_class", "*_file", "backend", "is_local", "name_or_path", "device_map"), "the origin"),
    **dict.fromkeys(("special_tokens_map", "auto_map"), "the origin"),
    # transformers also stores the arguments that the tokenizer was loaded with.
    **dict.fromkeys(("local_files_only", "trust_remote_code", "revision", "subfolder", "_commit_hash"), "the origin"),
    **dict.fromkeys(("cache_dir", "processor_class", "init_inputs"), "the origin"),
    **dict.fromkeys(("chat_template", "model_max_length", "model_input_names", "use_default_system_prompt"), "read"),
    **dict.fromkeys(("padding*", "pad_to_*", "truncation*", "stride", "max_length", "max_len"), "requests pad nothing"),
    **dict.fromkeys(("clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors"), "in the decoder"),
    **dict.fromkeys(("legacy", "sp_model_kwargs", "tokenize_chinese_chars", "strip_accents"), "in tokenizer.json"),
    **dict.fromkeys(("never_split", "do_basic_tokenize", "trim_offsets", "use_fast", "from_slow"), "in tokenizer.json"),
    "split_special_tokens": "checked by its value",
    "vocab_size": "in tokenizer.json",
}
TEXTS = (
    *("Hello World", "  def f(x):\n\t return 12345", "zażółć 中文 🙂", "he'll HE'LL don't, we'RE", "ﬁ Å e\u0301 ½ İ"),
    *("a\n\nb\r\n \n  c", "1234567 3.14 0x1F", "snake_case camelCase <b>x</b> !!!???", "a   b\t\tc   ", ""),
)
# The key of `tokenizer_config.json` -> the key of BERT's normalizer in `tokenizer.json`. If strip_accents is null,
# accents are stripped where letters become lower case.
OF_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
BEGIN_AND_END = ("add_bos_token", "add_eos_token")  # transformers makes the post-processor from these keys
EFFECTS = (*BEGIN_AND_END, "split_special_tokens")
MOST_ADDED = 300  # the number of added tokens that are tried inside a text


def check_tokenizer(path: Path, tokenizer: Any, ignore: Sequence[str]) -> UnusedKeys:
    """Return the unknown keys of `tokenizer_config.json` in folder `path`, whose tokenizer is `tokenizer`.

    Raises:
        InputError: an unknown key may change tokens, or the tokenizer does not do what a key says.
    """
    where = path / FILE
    content = read_json(where) if where.is_file() else {}
    # A key such as prepend_bos_token looks like the name of a special token, but its value true makes it a switch.
    switches = [name for name, value in content.items() if value is True and name.endswith(("_token", "_tokens"))]
    unused = check_keys(
        where,
        FILE,
        [name for name, value in content.items() if value is not None and name not in switches],
        harmless=KNOWN,
        ignore=ignore,
    )
    check_keys(where, FILE, [name for name in switches if name not in EFFECTS], ignore=ignore, refused=("*",))
    _check_added_tokens(path, content, tokenizer)
    _check_ends(path, content, ignore)
    # The exported file is read again, because the library drops what a damaged tokenizer has twice when it writes one.
    exported = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if (stored := stored_tokenizer(path)) is not None:
        added = [token.content for _, token in sorted(stored.get_added_tokens_decoder().items())][:MOST_ADDED]
        begins_and_ends = not any(name in content for name in BEGIN_AND_END)
        for text in (*TEXTS, " ".join(added), "x".join(added)):
            own, read = (backend.encode(text, add_special_tokens=begins_and_ends).ids for backend in (exported, stored))
            if own != read:
                raise InputError(
                    f"the tokenizer of {path} makes other tokens of {text[:40]!r} by its settings ({FILE}) than its "
                    "tokenizer.json does, or tokenizer.json has a number twice; correct one of them"
                )
    for name, value in content.items():
        done = _effect(name, tokenizer)
        if isinstance(value, bool) and done is not None and done != value and not matches(name, ignore):
            raise InputError(
                f"{where} has {name} {json.dumps(value)}, and the tokenizer does otherwise; correct it, or say "
                f"{IGNORE} {name} to take the tokenizer as it is"
            )
    return unused


def _check_added_tokens(path: Path, content: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuse settings that give an added token another number than `tokenizer.json` does.

    Raises:
        InputError: there is such a token.
    """
    stated: list[tuple[str, int]] = []
    decoder = content.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and str(number).isdigit():
            stated.append((str(token.get("content")), int(number)))
    file = path / "added_tokens.json"
    if file.is_file():
        stated += [(text, number) for text, number in read_json(file).items() if type(number) is int]
    whole = path / "tokenizer.json"
    listed = read_json(whole).get("added_tokens") if whole.is_file() else None
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int:
            stated.append((str(token.get("content")), int(token["id"])))
    for text, number in stated:
        if (found := tokenizer.backend_tokenizer.token_to_id(text)) != number:
            raise InputError(
                f"{path} gives the added token {text!r} the number {number}, and its tokenizer has {found}; correct "
                "added_tokens_decoder or added_tokens.json, or tokenizer.json"
            )


def _check_ends(path: Path, content: Mapping[str, Any], ignore: Sequence[str]) -> None:
    """Refuse two settings files that name different tokens as the end of a text.

    Raises:
        InputError: they do, and the user did not ignore `eos_token`.
    """
    file = path / "special_tokens_map.json"
    if not file.is_file() or matches("eos_token", ignore):
        return
    ends = [settings.get("eos_token") for settings in (content, read_json(file))]
    texts = [str(end.get("content") if isinstance(end, dict) else end) for end in ends if end is not None]
    if len(set(texts)) > 1:
        raise InputError(
            f"{path} ends a text with {texts[0]!r} by {FILE} and with {texts[1]!r} by {file.name}; correct one, "
            f"or say {IGNORE} eos_token to take the one that transformers takes"
        )


def _effect(name: str, tokenizer: Any) -> bool | None:
    """Whether the tokenizer does what the switch `name` turns on; None if this cannot be known."""
    ids = list(tokenizer("A").input_ids)
    if name == "add_bos_token" and tokenizer.bos_token_id is not None:
        return ids[:1] == [tokenizer.bos_token_id]
    if name == "add_eos_token" and tokenizer.eos_token_id is not None:
        return ids[-1:] == [tokenizer.eos_token_id]
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    # Other pre-tokenizers add no space before a text that begins with a space, so the texts would differ.
    if name == "add_prefix_space" and "ByteLevel" in str(content["pre_tokenizer"]):
        return ids == list(tokenizer(" A").input_ids)
    normalizer = content["normalizer"] or {}
    parts = normalizer.get("normalizers", [normalizer])
    bert = next((part for part in parts if part.get("type") == "BertNormalizer"), None)
    if bert is not None and name in OF_BERT:
        return bool(bert["lowercase"] if bert[OF_BERT[name]] is None else bert[OF_BERT[name]])
    if name == "do_lower_case":
        return ids == list(tokenizer("a").input_ids)
    return False if name == "split_special_tokens" else None
