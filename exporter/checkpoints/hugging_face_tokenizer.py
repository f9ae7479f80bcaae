"""The reader of the tokenizer and of the special tokens of a Hugging Face folder.

`tokenizer.json` prevails over transformers' class.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from sharp.core.errors import InputError
from sharp.core.tokenizer_trial import check_tokenizer_file
from sharp.core.vocabulary import check_special_tokens
from sharp.exporter.checkpoints.hugging_face_checks import reason
from sharp.exporter.checkpoints.json_files import read_json

FILE = "tokenizer.json"
# The files that transformers makes a tokenizer of: fast tokenizers, GPT-2 and Qwen, BERT.
VOCABULARIES = (FILE, "vocab.json", "vocab.txt")
SENTENCE_PIECE = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
COMPONENTS = ("normalizer", "pre_tokenizer", "model", "decoder")
CONFIG, NEWEST, NAMED = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
TEMPLATE = "chat_template.json"  # an older place of the chat template; llama.cpp's converter reads it, too


def read_tokenizer(path: Path, where: dict[str, Any]) -> Any | None:
    """Return the fast tokenizer of folder `path`; None if the folder has no tokenizer, so the model takes ids only.

    `where` has the arguments that name the folder to transformers. transformers 5 builds the tokenizer of many classes
    anew from the vocabulary alone, with the pre-tokenizer of the class that `tokenizer_class` names. Most published
    folders name GPT-2's or Llama's class but have another pre-tokenizer. `tokenizer.json` has the components that the
    model was trained with, so these are put back.

    Raises:
        InputError: the tokenizer is damaged, or has no fast form, or is SentencePiece's file alone.
    """
    file = path / FILE
    alone = None if file.is_file() else next((name for name in SENTENCE_PIECE if (path / name).is_file()), None)
    if alone is not None:  # transformers makes a tokenizer without SentencePiece's normalization and space flags
        raise InputError(
            f"{path} has {alone} without tokenizer.json, and other programs make other tokens of it; add the "
            "tokenizer.json of the publisher, or export a GGUF file that llama.cpp's convert_hf_to_gguf.py makes"
        )
    if not any((path / name).exists() for name in VOCABULARIES):
        return None
    if file.is_file():
        check_tokenizer_file(file)
    _check_settings(path)
    try:
        tokenizer = _class_of(path).from_pretrained(**where)
    except Exception as error:
        raise InputError(f"the tokenizer of {path} cannot be read: {reason(error)}") from error
    if not tokenizer.is_fast:
        raise InputError(
            f"the tokenizer of {path} has no fast form (tokenizer.json); convert it with transformers first"
        )
    backend = tokenizer.backend_tokenizer
    if (stored := stored_tokenizer(path)) is not None:
        _put_back(backend, stored)
    backend.encode_special_tokens = False  # transformers' class may set this, and tokenizer.json cannot store it
    backend.no_truncation()  # the server refuses a request that is too long
    backend.no_padding()
    if tokenizer.chat_template is None and (path / TEMPLATE).is_file():
        tokenizer.chat_template = _template(path / TEMPLATE)
    return tokenizer


def other_templates(path: Path) -> tuple[str, ...]:
    """Return a sentence for each chat template in folder `path` that differs from the one that transformers takes.

    transformers takes `chat_template.jinja` and those in `additional_chat_templates`, else that of
    `tokenizer_config.json`.

    Raises:
        InputError: a file that may hold a chat template is damaged.
    """
    found: dict[str, Any] = {}
    if (path / NEWEST).is_file():
        found[NEWEST] = (path / NEWEST).read_text(encoding="utf-8", errors="replace")
    elif named := sorted(file.name for file in (path / NAMED).glob("*.jinja")):
        found[NAMED] = " ".join(named)
    if (path / CONFIG).is_file():
        found[CONFIG] = read_json(path / CONFIG).get("chat_template")
    if (path / TEMPLATE).is_file():
        found[TEMPLATE] = _template(path / TEMPLATE)
    taken, *others = [name for name, template in found.items() if template] or [""]
    return tuple(
        f"{path} has another chat template in {name} than in {taken}, which is taken, as in transformers"
        for name in others
        if str(found[name]).strip() != found[taken].strip()
    )


def stored_tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer of `tokenizer.json` in folder `path`, without truncation or padding; None without a file.

    A damaged file raises an error of the library `tokenizers`, so check the file first.
    """
    file = path / FILE
    if not file.is_file():
        return None
    stored = Tokenizer.from_file(str(file))
    stored.no_truncation()
    stored.no_padding()
    return stored


def _check_settings(path: Path) -> None:
    """Refuse the setting `add_special_tokens`, which in transformers is a method of the tokenizer and an argument.

    Raises:
        InputError: `tokenizer_config.json` has this setting, or is damaged.
    """
    file = path / CONFIG
    if file.is_file() and "add_special_tokens" in read_json(file):
        raise InputError(f"{file} has add_special_tokens, which is an argument of calls and no setting; leave it out")


def _class_of(path: Path) -> Any:
    """Return the class that reads the tokenizer of folder `path`.

    Code that comes with the folder is never run. If the settings name such a class, `tokenizer.json` is read alone.
    """
    file = path / CONFIG
    own = file.is_file() and "auto_map" in read_json(file) and (path / FILE).is_file()
    return PreTrainedTokenizerFast if own else AutoTokenizer


def _put_back(backend: Tokenizer, stored: Tokenizer) -> None:
    """Replace, in place, the components of `backend` that differ from those of `stored`."""
    made, saved = (json.loads(tokenizer.to_str()) for tokenizer in (backend, stored))
    for name in COMPONENTS:
        if made[name] != saved[name]:
            setattr(backend, name, getattr(stored, name))


def _template(file: Path) -> str:
    """Return the chat template of a JSON file. InputError if the file has none, or it is no text."""
    try:
        template = json.loads(file.read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{file} has no chat_template; correct the file, or leave it out") from error
    if not isinstance(template, str):
        raise InputError(f"{file} has a chat_template that is no text; correct the file, or leave it out")
    return template


@dataclass(frozen=True)
class TextBoundaries:
    """The id of the token that begins a text (None without one), and the ids of the tokens that end a text."""

    bos: int | None
    eos: tuple[int, ...]


def special_tokens(
    path: Path,
    facts: PreTrainedConfig,
    generation: GenerationConfig | None,
    vocab_size: int,
    of_tokenizer: int | None = None,
) -> TextBoundaries:
    """Return the special tokens that the checkpoint at `path` names.

    `of_tokenizer` is the token that ends a text by the tokenizer's settings. It ends a generation in addition to the
    tokens of the configuration, as in vLLM.

    An id outside the vocabulary is left out if it is the default of the configuration's class. For example, the files
    of a GPT-2 with 256 tokens have the default 50256, although nobody chose it.

    Raises:
        InputError: another id is outside the vocabulary.
    """
    default = type(facts)()

    def kept(token: int, name: str) -> bool:
        """Whether to keep a special token: it is in the vocabulary, or no default of the config's class."""
        return 0 <= token < vocab_size or token != getattr(default, name, None)

    own = None if generation is None else generation.eos_token_id  # encoders have no generation config; 0 is a token
    eos = facts.eos_token_id if own in (None, []) else own
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if of_tokenizer is not None and of_tokenizer < vocab_size:
        ends = list(dict.fromkeys([*ends, of_tokenizer]))
    bos = facts.bos_token_id
    found = TextBoundaries(
        None if bos is None or not kept(bos, "bos_token_id") else bos,
        tuple(token for token in ends if kept(token, "eos_token_id")),
    )
    check_special_tokens(str(path), vocab_size, found.bos, found.eos)
    return found
