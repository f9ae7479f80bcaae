"""The text of an adaptation: files of the user's, or the documentation that comes with Python."""

import ast
import glob
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharp.plugins.errors import InputError, NotFoundError

SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".parquet")
BLOCK = 4000  # characters; one block of `HELD_OUT_EVERY` is not trained on
HELD_OUT_EVERY = 20
MOST_CHARACTERS = 16_000_000
MOST_TOKENS_PER_CHARACTER = 1.2  # above, the tokenizer has only bytes for the script
MOST_UNKNOWN = 0.02
PYTHON_TEXT = "the documentation in Python's standard library (PSF licence)"


@dataclass(frozen=True)
class Text:
    """Token ids int64 [tokens] to train on and held out, and what they are of."""

    name: str
    train: Tensor
    held_out: Tensor


def read_text(paths: Sequence[Path], tokenizer: Any, vocab_size: int, least: int, shorter: str) -> Text:
    """The text of files and folders; without any, Python's own documentation.

    `least` is the number of tokens that training and held-out part must have, `shorter` the option that needs less.

    Raises:
        NotFoundError: nothing is at a path.
        InputError: a file cannot be read, or the text is too short or in a script that the tokenizer does not know.
    """
    documents = [document for path in paths for document in _documents(path)] if paths else list(_python_documents())
    name = ", ".join(path.name for path in paths) if paths else PYTHON_TEXT
    size = min(BLOCK, sum(map(len, documents)) // (2 * HELD_OUT_EVERY) + 1)  # a short text has held-out blocks, too
    blocks = list(_blocks(documents, size))
    step = -(-sum(map(len, blocks)) // MOST_CHARACTERS)
    blocks = blocks[:: max(1, step)]
    parts = []
    for held_out in (False, True):
        chosen = [
            one for index, one in enumerate(blocks) if (index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2) == held_out
        ]
        parts.append(encode("\n\n".join(chosen), tokenizer, vocab_size, name))
    for part, what in zip(parts, ("to train on", "held out"), strict=True):
        if len(part) < least:
            raise InputError(
                f"the text ({name}) is too short: {len(part)} tokens {what}, but a sequence has {least}; "
                f"give more with --text, or choose {shorter}"
            )
    return Text(name, *parts)


def encode(text: str, tokenizer: Any, vocab_size: int, name: str) -> Tensor:
    """Token ids int64 [tokens] of a text.

    Raises:
        InputError: the tokenizer does not know its script, or has tokens that the model does not have.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    if not ids:
        return torch.zeros(0, dtype=torch.int64)
    unknown = 0 if tokenizer.unk_token_id is None else ids.count(tokenizer.unk_token_id)
    if len(ids) > MOST_TOKENS_PER_CHARACTER * len(text) or unknown > MOST_UNKNOWN * len(ids):
        raise InputError(
            f"the model's tokenizer does not know the script of the text ({name}): it makes {len(ids)} tokens of "
            f"{len(text)} characters, {unknown} of them unknown; give text of the languages that the model was made for"
        )
    if max(ids) >= vocab_size:
        raise InputError(
            f"the tokenizer has token {max(ids)}, but the model only {vocab_size}; they do not belong together"
        )
    return torch.tensor(ids)


def _documents(path: Path) -> Iterator[str]:
    if not path.exists():
        raise NotFoundError(f"text {path} does not exist; give a file or folder with --text")
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
        if not files:
            raise InputError(
                f"the folder {path} has no file that ends in {', '.join(SUFFIXES)}; give another with --text"
            )
        for file in files:
            yield from _documents(file)
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    else:
        try:
            content = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise InputError(f"text {path} cannot be read as UTF-8: {error}; give another with --text") from error
        yield from _lines(path, content) if path.suffix == ".jsonl" else (content,)


def _lines(path: Path, content: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):  # JSON may hold what `splitlines` takes for ends of lines
        if line.strip():
            try:
                yield str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise InputError(f"{path}, line {number}, is no JSON object with an entry 'text'; repair it") from error


def _parquet(path: Path) -> Iterator[str]:
    try:
        import datasets  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise InputError(
            f"{path} is read with the library datasets: pip install datasets; or give text files"
        ) from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it says of a damaged file is said below
    try:
        # Streamed, or the library copies the whole file to its cache first.
        rows = datasets.load_dataset("parquet", data_files=glob.escape(str(path)), split="train", streaming=True)
        for row in rows:
            if row["text"] is not None:
                yield str(row["text"])
    except KeyError as error:
        raise InputError(f"{path} has no column 'text'; give another with --text") from error
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet; give another with --text") from error


def _python_documents() -> Iterator[str]:
    """The language reference, and the docstrings of the standard library."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise NotFoundError("this Python has no documentation to learn from; give a text with --text") from error
    yield from topics.values()
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        if {"test", "tests", "site-packages", "idlelib", "lib2to3", "pydoc_data"} & set(file.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        yield "\n\n".join(one for one in found if one and len(one) > 80)


def _blocks(documents: Iterable[str], most: int) -> Iterator[str]:
    """Parts of about `most` characters, broken between paragraphs where there are any."""
    block: list[str] = []
    size = 0
    for document in documents:
        for paragraph in document.split("\n\n"):
            for start in range(0, len(paragraph), most):
                block.append(paragraph[start : start + most])
                size += len(block[-1])
                if size >= most:
                    yield "\n\n".join(block)
                    block, size = [], 0
    if block:
        yield "\n\n".join(block)
