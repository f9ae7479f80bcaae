"""`TokenTexts`: text and bytes of single tokens, as logprobs show them."""

import json
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from sharp.serving.text.detokenizer import INCOMPLETE
from sharp.serving.text.tokenizer import Tokenizer

CACHED_TOKENS = 2**15
PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))


@dataclass(frozen=True)
class TokenText:
    """A single token as logprobs show it.

    Attributes:
        text: the token inside a text; parts of characters are U+FFFD.
        name: the text; for a token that is not whole characters its bytes as OpenAI writes them, or its id.
        utf8: the bytes; None if they are not known.
        characters: the number of characters of a completion's text that begin in the token.
        inside: whether the token begins inside a character that a token before it began.
    """

    text: str
    name: str
    utf8: list[int] | None
    characters: int
    inside: bool


class TokenTexts:
    """The tokens of a model, safe to share between threads. `of(token_id)` returns a `TokenText`, from a cache."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        # A token takes three decodings, and logprobs name the same few tokens again and again.
        self.of: Callable[[int], TokenText] = lru_cache(CACHED_TOKENS)(self._read)

    def load(self) -> None:
        """Read the vocabulary now, and not later in the event loop, because that takes a while."""
        _ = self._parts

    @cached_property
    def _parts(self) -> Mapping[int, bytes] | None:
        """The bytes of tokens that are parts of characters, by token id; None without a tokenizer."""
        return None if self._tokenizer is None else parts_of_characters(json.loads(self._tokenizer.to_json()))

    def named_by_ids(self) -> "TokenTexts":
        """Return a copy in which every token has a name such as token_id:97."""
        named = copy(self)
        named.of = lambda token_id: replace(self.of(token_id), text=(name := f"token_id:{token_id}"), name=name)
        return named

    def _read(self, token_id: int) -> TokenText:
        """Return the text, name and bytes of a token."""
        if self._tokenizer is None:
            return TokenText(name := f"token_id:{token_id}", name, None, 0, inside=False)
        text = self._tokenizer.token(token_id)
        utf8: bytes | None = text.encode()
        if INCOMPLETE in text:
            utf8 = None if self._parts is None else self._parts.get(token_id, utf8)
        name = f"token_id:{token_id}" if utf8 is None else _name(utf8)
        if not self._tokenizer.decode([token_id, token_id]):  # a special token, which no text has
            return TokenText(text, name, None if utf8 is None else list(utf8), 0, inside=False)
        if utf8 is None:
            return TokenText(text, name, None, len(text), inside=False)
        begins = [byte & 0xC0 != 0x80 for byte in utf8]
        return TokenText(text, name, list(utf8), sum(begins), inside=not all(begins[:1]))


def _name(utf8: bytes) -> str:
    """Return OpenAI's name of a token: its text, or "bytes:" and its escaped bytes if these are not UTF-8."""
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + utf8.decode(errors="backslashreplace")


def parts_of_characters(file: Mapping[str, Any]) -> Mapping[int, bytes] | None:
    """Return the bytes of the tokens of a tokenizer file that are not whole characters.

    The result is None if the decoder is neither ByteLevel nor ByteFallback, because no other is known to have such
    tokens.
    """
    decoder = file.get("decoder") or {}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
    if "ByteLevel" in kinds:
        read = _byte_level
    elif "ByteFallback" in kinds:
        read = _byte_fallback
    else:
        return None
    vocabulary = file["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # Unigram's pairs of token and score, by id
        vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
    parts = {}
    for token, token_id in vocabulary.items():
        utf8 = read(token)
        try:
            utf8.decode()
        except UnicodeDecodeError:
            parts[token_id] = utf8
    return parts


# GPT-2's table of bytes, in which a byte that is no printable character of Latin-1 is a character from U+0100 on.
_BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))
}


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE, whose letters stand for bytes."""
    try:
        return bytes(_BYTES[letter] for letter in token)
    except KeyError:  # the token is plain text, as added tokens are
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    """Return the bytes of a token: one byte for "<0xNN>", else its UTF-8."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return token.encode() if byte is None else bytes.fromhex(byte[1])
