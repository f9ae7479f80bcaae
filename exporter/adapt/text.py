"""The text of an adaptation: files of the user, or the documentation that comes with Python."""

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

from sharp.core.errors import InputError, NotFoundError
from sharp.core.licence import licence
from sharp.exporter.adapt.settings import AdaptSettings
from sharp.exporter.adapt.student import Student

SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".parquet")
BLOCK = 4000  # characters; one block in `HELD_OUT_EVERY` is held out
HELD_OUT_EVERY = 20
MOST_CHARACTERS = 16_000_000
MOST_TOKENS_PER_CHARACTER = 1.2  # a tokenizer with more has only bytes for the script
MOST_UNKNOWN = 0.02
PYTHON_TEXT = "the documentation in Python's standard library (PSF licence)"


@dataclass(frozen=True)
class TrainingText:
    """Token ids int64 [tokens] to train on and held out, and the name of their text."""

    name: str
    train: Tensor
    held_out: Tensor


def training_text(settings: AdaptSettings, student: Student) -> TrainingText:
    """Read the text to train on: the user's files, or Python's documentation.

    Raises:
        NotFoundError: a file does not exist.
        InputError: a file cannot be read, the tokenizer does not know the script, or the part to train on or the
            held-out part is shorter than the longest training sequence.
    """
    long_length = settings.longest_sequence(student.decoder.config.max_context)
    shorter = "--stage short" if long_length > settings.length else "a smaller --length"
    least = max(settings.length, long_length) + 1
    paths = tuple(map(Path, settings.text))
    return read_text(paths, student.opened.tokenizer, student.decoder.config.vocab_size, least, shorter)


def unlike_text(settings: AdaptSettings, student: Student) -> tuple[str, Tensor]:
    """Return the name and the token ids int64 [tokens] of a text unlike the training text: `held_out`, or the licence.

    Raises:
        NotFoundError: the text is no file.
        InputError: the text is too short, or the tokenizer does not know its script.
    """
    path = licence() if settings.held_out is None else Path(settings.held_out)
    if not path.is_file():
        said = "is a folder" if path.is_dir() else "does not exist"
        raise NotFoundError(f"text {path} {said}; give a file with --held-out")
    content = path.read_text(encoding="utf-8", errors="replace")
    tokens = encode(content, student.opened.tokenizer, student.decoder.config.vocab_size, path.name)
    if len(tokens) < 16:
        raise InputError(f"text {path} is too short: {len(tokens)} tokens; give another with --held-out")
    return path.name, tokens


def read_text(paths: Sequence[Path], tokenizer: Any, vocab_size: int, least: int, shorter: str) -> TrainingText:
    """Read the text of files and folders, or Python's documentation if `paths` is empty.

    `tokenizer` is one of transformers. `least` is the number of tokens that each part, training and held-out, must
    have; `shorter` names an option that needs fewer, for the message.

    Raises:
        NotFoundError: nothing is at a path, or this Python has no documentation.
        InputError: a file cannot be read, a folder has no text file, or the text is too short or in a script that the
            tokenizer does not know.
    """
    name, *texts = read_documents(paths)
    parts = [encode(document, tokenizer, vocab_size, name) for document in texts]
    for part, what in zip(parts, ("to train on", "held out"), strict=True):
        if len(part) < least:
            raise InputError(
                f"the text ({name}) is too short: {len(part)} tokens {what}, but a sequence has {least}; "
                f"give more with --text, or choose {shorter}"
            )
    return TrainingText(name, *parts)


def read_documents(paths: Sequence[Path]) -> tuple[str, str, str]:
    """Return the name of the text of files and folders, its part to train on, and the held-out part.

    The text is Python's documentation if `paths` is empty. One block in 20 is held out. Of a text of more than 16
    million characters, only every n-th block is used, so that at most 16 million remain. An empty text gives empty
    parts.

    Raises:
        NotFoundError: nothing is at a path, or this Python has no documentation.
        InputError: a file cannot be read, or a folder has no text file.
    """
    documents = [document for path in paths for document in _documents(path)] if paths else list(_python_documents())
    name = ", ".join(path.name for path in paths) if paths else PYTHON_TEXT
    size = min(BLOCK, sum(map(len, documents)) // (2 * HELD_OUT_EVERY) + 1)  # a short text has held-out blocks, too
    blocks = list(_blocks(documents, size))
    step = -(-sum(map(len, blocks)) // MOST_CHARACTERS)
    blocks = blocks[:: max(1, step)]
    parts = []
    for is_held_out in (False, True):
        chosen = [
            block
            for index, block in enumerate(blocks)
            if (index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2) == is_held_out
        ]
        parts.append("\n\n".join(chosen))
    train, held_out = parts
    return name, train, held_out


def encode(text: str, tokenizer: Any, vocab_size: int, name: str) -> Tensor:
    """Encode a text as token ids int64 [tokens], without special tokens; `name` is that of the text, for messages.

    Raises:
        InputError: the tokenizer does not know the script of the text, or has tokens that the model does not have.
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
    """Yield the texts of a file (.txt, .jsonl, .parquet, ...), or of all such files in a folder, in order of names.

    Raises:
        NotFoundError: `path` does not exist.
        InputError: the folder has no such file, or a file cannot be read.
    """
    if not path.exists():
        raise NotFoundError(f"text {path} does not exist; give a file or folder with --text")
    if path.is_dir():
        files = sorted(entry for entry in path.rglob("*") if entry.suffix in SUFFIXES and entry.is_file())
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
    """Yield the entry `text` of each line of JSON in `content`. InputError names the first line without one."""
    for number, line in enumerate(
        content.split("\n"), 1
    ):  # JSON strings may hold other characters at which `splitlines` splits
        if line.strip():
            try:
                yield str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise InputError(f"{path}, line {number}, is no JSON object with an entry 'text'; repair it") from error


def _parquet(path: Path) -> Iterator[str]:
    """Yield the column `text` of a Parquet file, row by row.

    InputError if datasets is not installed or the file is damaged.
    """
    try:
        import datasets  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise InputError(
            f"{path} is read with the library datasets: pip install datasets; or give text files"
        ) from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # a damaged file raises the error below
    try:
        # Without streaming, the library would first copy the whole file to its cache.
        rows = datasets.load_dataset("parquet", data_files=glob.escape(str(path)), split="train", streaming=True)
        for row in rows:
            if row["text"] is not None:
                yield str(row["text"])
    except KeyError as error:
        raise InputError(f"{path} has no column 'text'; give another with --text") from error
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet; give another with --text") from error


def _python_documents() -> Iterator[str]:
    """Yield Python's language reference, and the docstrings of the standard library.

    Raises:
        NotFoundError: this Python was installed without its documentation.
    """
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
        yield "\n\n".join(docstring for docstring in found if docstring and len(docstring) > 80)


def _blocks(documents: Iterable[str], most: int) -> Iterator[str]:
    """Yield parts of about `most` characters, split between paragraphs; longer paragraphs are cut."""
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
