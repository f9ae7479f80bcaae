"""Write `llama_cpp/*.json`, llama.cpp's results for tiny GGUF files (`make foreign`, then run this as a module)."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from sharp.exporter.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS
from tests.exporter.checkpoints.gguf_cases import ALL_CASES, LENGTH
from tests.exporter.checkpoints.gguf_texts import TEXTS
from tests.exporter.checkpoints.gguf_vocabularies import (
    END_CASES,
    SMOLLM2,
    byte_level,
    sentence_piece,
    write_vocabulary,
)
from tests.full.gguf.second_opinion import run

FOLDER = Path(__file__).parent / "llama_cpp"
POSITIONS = (9, 50, 99)
TOKENS = np.random.default_rng(0).integers(0, 90, LENGTH).tolist()
SENTENCE_PIECE = {
    "plain": {},
    "no-prefix": {"add_space_prefix": False},
    "ends": {"add_bos_token": False, "add_eos_token": True},
}


def digest(tokens: Sequence[int]) -> str:
    """Return a short digest of tokens."""
    return f"{zlib.crc32(json.dumps(list(tokens)).encode()):08x}"


def trained_merges() -> list[str]:
    """Return the merges of a byte-level vocabulary that was trained on the texts without any split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1400, min_frequency=1, initial_alphabet=alphabet, max_token_length=12, show_progress=False
    )
    tokenizer.train_from_iterator([text * 2 for text in TEXTS], trainer)
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def trained_pieces() -> list[str]:
    """Return pieces for a SentencePiece vocabulary, in the order in which they are joined."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=900, min_frequency=2, max_token_length=8, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") * 2 for text in TEXTS if text.isprintable()], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    joined = ["".join(pair) for pair in model["merges"]]
    letters = sorted({letter for text in joined for letter in text})  # other characters become bytes
    return list(dict.fromkeys([*joined, *letters]))


def main() -> None:
    """Write the fixtures of logits, tokens and ends of generation."""
    FOLDER.mkdir(exist_ok=True)
    merges, pieces = trained_merges(), trained_pieces()
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = [case.write(folder / f"{name}.gguf") for name, case in ALL_CASES.items()]
        computed = run(files, tokens=TOKENS)
        rounded = {
            case: [[float(f"{value:.5g}") for value in result["logits"][position]] for position in POSITIONS]
            for case, result in zip(ALL_CASES, computed, strict=True)
        }
        vocabularies = {
            **{f"pre-{name}": byte_level(merges, pre=name) for name in PRE_TOKENIZERS},
            **{f"spm-{name}": sentence_piece(pieces, **keys) for name, keys in SENTENCE_PIECE.items()},
            **{f"end-{name}": tokens for name, tokens in END_CASES.items()},
        }
        files = [write_vocabulary(folder / f"{name}.gguf", tokens) for name, tokens in vocabularies.items()]
        found = dict(zip([*vocabularies, "smollm2"], run([*files, SMOLLM2], texts=TEXTS), strict=True))
    write("logits", rounded)
    write(
        "tokens",
        {
            "merges": merges,
            "pieces": pieces,
            "byte_level": {name: "".join(map(digest, found[f"pre-{name}"]["tokens"])) for name in PRE_TOKENIZERS},
            "sentence_piece": {name: found[f"spm-{name}"]["tokens"] for name in SENTENCE_PIECE},
            "smollm2": found["smollm2"]["tokens"],
            "ends": {"smollm2": found["smollm2"]["ends"], **{name: found[f"end-{name}"]["ends"] for name in END_CASES}},
        },
    )


def write(name: str, content: object) -> None:
    """Write one fixture as JSON."""
    (FOLDER / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
