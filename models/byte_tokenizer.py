"""A Hugging Face tokenizer whose tokens are the bytes of UTF-8 text, so no text is out of vocabulary."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256
VOCAB_SIZE = 257


def byte_characters() -> list[str]:
    """Return the 256 characters that ByteLevel writes for the bytes: itself if printable, otherwise from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """Make a tokenizer whose ids are byte values, and 256 for `<|endoftext|>`; it decodes back to the same text."""
    tokenizer = Tokenizer(BPE(vocab={character: byte for byte, character in enumerate(byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def save_byte_tokenizer(folder: Path) -> Path:
    """Write the `tokenizer.json` of `byte_tokenizer` into `folder`, which must exist, and return its path."""
    path = folder / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return path
