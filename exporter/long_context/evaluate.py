"""The steps of `sharp evaluate`: every model reads every document and responds. Results in the folder are reused."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sharp.core.errors import InputError
from sharp.core.failed_connection import is_url
from sharp.exporter.adapt.text import read_documents
from sharp.exporter.long_context.documents import (
    COPIED_WORDS,
    COPY_WORDS,
    can_be_copied,
    make_document,
    sentences_of,
)
from sharp.exporter.long_context.folder_runtime import FolderRuntime
from sharp.exporter.long_context.reader import DocumentReader
from sharp.exporter.long_context.server_reader import ServerDocumentReader
from sharp.exporter.long_context.subjects import EvaluateSettings, Subject, check_subjects, is_checkpoint
from sharp.exporter.long_context.token_reader import TokenReader
from sharp.exporter.long_context.torch_runtime import TorchRuntime
from sharp.exporter.staging import held
from sharp.models.device import choose_device

VERSION = 1  # version of documents and questions; results of different versions are not comparable
DOCUMENTS_FILE = "documents.jsonl"
FIELDS = {"model", "length", "document", "tokens", "tasks", "losses", "heads"}  # fields of a line of the documents file
SPARE = 192  # tokens that a question, the chat form and a completion may take
Line = dict[str, Any]


def open_subject(subject: Subject, settings: EvaluateSettings) -> DocumentReader:
    """Open a model of any kind. `subject` and `settings` have passed `check_subjects`.

    Raises:
        NotFoundError, InputError: the model cannot be opened, or the control does not apply to it.
    """
    if is_url(subject.source):
        return ServerDocumentReader(subject.source)
    if not is_checkpoint(subject.source):
        folder = FolderRuntime(Path(subject.source), settings.threads)
        return TokenReader(folder, folder.tokenizer, settings.form, subject.source)
    runtime = TorchRuntime(Path(subject.source), subject.control, choose_device(settings.device))
    return TokenReader(runtime, runtime.opened.tokenizer, settings.form, subject.source)


# phase(name, steps) announces a model and returns a function to call after each document.
Phase = Callable[[str, int], Callable[[], None]]


def evaluate(
    subjects: Sequence[Subject],
    settings: EvaluateSettings,
    folder: Path,
    phase: Phase = lambda _name, _steps: lambda: None,
    say: Callable[[str], None] = lambda _text: None,
) -> list[Line]:
    """Evaluate every subject and return a line per document. Lines are kept in `folder` and not computed again.

    A model without enough context for a document gets no line for it, so the list may be empty.

    Args:
        subjects: the models, opened one after the other.
        settings: the documents and how questions are asked.
        folder: made if it does not exist; receives documents.jsonl.
        phase: called as phase(name, steps) before a model reads its missing documents; returns a function that is
            called after each of them.
        say: called with messages for the user.

    Returns:
        Lines with the entries model (the subject's name), length, document (its number), tokens, tasks (for each task a
        list of results of questions), losses (sums of cross entropies by position, or None) and heads (entropy and
        support [layers][heads], or None).

    Raises:
        NotFoundError, InputError: a model or the text cannot be used, or `folder` has results of other settings, is not
            empty, is used by another command or cannot be written.
    """
    check_subjects(subjects, settings)
    with held(folder):
        return _evaluate(subjects, settings, folder, phase, say)


def _evaluate(
    subjects: Sequence[Subject], settings: EvaluateSettings, folder: Path, phase: Phase, say: Callable[[str], None]
) -> list[Line]:
    """Run `evaluate` after its checks, with the lock of the folder. `say` gets lines that tell what it does.

    Raises:
        NotFoundError, InputError: as `evaluate` does.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    name, _, held_out = read_documents(settings.text)
    sentences = sentences_of(held_out)
    if "copy" in settings.tasks and not can_be_copied(sentences):
        raise InputError(
            f"the text ({name}) has no sentences of {COPY_WORDS + COPIED_WORDS} words, which the task copy needs; give "
            "another with --text, or leave copy out of --tasks"
        )
    lines = _begin(folder, _identity(settings, name, held_out))
    for subject in subjects:
        missing = [pair for pair in _pairs(settings) if not _found(lines, subject, settings, *pair)]
        if not missing:
            continue
        say(f"opening {subject.name}")
        reader = open_subject(subject, settings)
        advance = phase(subject.name, len(missing))
        for tokens, number in missing:
            if not _fits(reader, tokens):
                say(f"{subject.name}: no documents of {tokens} tokens, as its context is {reader.max_context}")
                advance()
                continue
            line = _read(reader, subject, settings, sentences, tokens, number)
            lines = [row for row in lines if _key(row) != _key(line)] + [line]
            _append(folder, line)
            advance()
        del reader
    requested = {(subject.name, tokens, number) for subject in subjects for tokens, number in _pairs(settings)}
    return [line for line in lines if _key(line) in requested]


def _fits(reader: DocumentReader, tokens: int) -> bool:
    """Whether a model can read a document of `tokens` tokens, a question about it and a completion.

    PyTorch reads beyond the context, too, unless positions are a table.
    """
    if reader.max_context is None or tokens + SPARE <= reader.max_context:
        return True
    runtime = reader.runtime if isinstance(reader, TokenReader) else None
    return isinstance(runtime, TorchRuntime) and runtime.goes_beyond


def _pairs(settings: EvaluateSettings) -> Iterator[tuple[int, int]]:
    """Yield (length, number) of documents, ordered by number so that a stopped run has documents of all lengths.

    A length is in tokens, and a document's number from 0.
    """
    return ((tokens, number) for number in range(settings.documents) for tokens in settings.lengths)


def _key(line: Line) -> tuple[str, int, int]:
    """Return a result's model, length in tokens and document number, which together identify the result."""
    return line["model"], line["length"], line["document"]


def _found(lines: list[Line], subject: Subject, settings: EvaluateSettings, tokens: int, number: int) -> bool:
    """Whether `lines` hold the result of the subject's document `number` at `tokens` tokens, for all tasks."""
    return any(_key(line) == (subject.name, tokens, number) and {*settings.tasks} <= {*line["tasks"]} for line in lines)


def _identity(settings: EvaluateSettings, name: str, text: str) -> Line:
    """Return the values that must be equal for results to be continued: version, text, form and seed.

    `name` is the text's name; `text` its content, of which the hash is kept.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"version": VERSION, "text": name, "text_sha256": digest, "form": settings.form, "seed": settings.seed}


def _begin(folder: Path, identity: Line) -> list[Line]:
    """Return the complete lines in the documents file of `folder`, without its first line, `identity`.

    An incomplete last line, which a killed run has left, is cut off the file. Without lines behind the identity, the
    file is written anew with `identity`, the folder is made if it does not exist, and the result is empty.

    Raises:
        InputError: the lines are of another identity, the folder has no documents file but other content, or it cannot
            be written.
    """
    path = folder / DOCUMENTS_FILE
    try:
        if path.is_file():
            first, *rest = _whole_lines(path) or [None]
            if rest:
                if first != identity:
                    raise InputError(
                        f"{folder} has results of other settings ({path.name}); choose another folder with -o"
                    )
                return [line for line in rest if isinstance(line, dict) and line.keys() >= FIELDS]
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} is not empty and has no {DOCUMENTS_FILE}; choose another folder with -o")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(identity) + "\n", encoding="utf-8")
    except OSError as error:
        raise _not_written(folder, error) from error
    return []


def _whole_lines(path: Path) -> list[Any]:
    """Return the parsed lines of a file, and cut off an incomplete last line that a killed run has left.

    Lines that are no JSON are left out.
    """
    with path.open("r+b") as file:
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # otherwise the next line would be appended to the incomplete line
            file.truncate(len(whole))
    lines = []
    for text in whole.split(b"\n"):
        with suppress(ValueError, RecursionError):  # the document of a damaged line is read again
            lines.append(json.loads(text))
    return lines


def _append(folder: Path, line: Line) -> None:
    """Append one result to the folder's file. InputError if it cannot be written."""
    try:
        with (folder / DOCUMENTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise _not_written(folder, error) from error


def _not_written(folder: Path, error: OSError) -> InputError:
    """Return the error for a results folder that cannot be written."""
    return InputError(f"{folder} cannot be written: {error.strerror}; choose another folder with -o")


def _read(
    reader: DocumentReader, subject: Subject, settings: EvaluateSettings, sentences: list[str], tokens: int, number: int
) -> Line:
    """Let one model read document `number` of `tokens` tokens and respond to its questions; return its line.

    The entries of the line are those of `evaluate`. A question has the entries among (whether the expected choice is
    the likeliest; None without scores), nats (-ln of its probability among the choices; None without its score), text
    (whether the greedy text is right), depth, choices (their number) and, for task tracking, hops.

    Raises:
        InputError: the document cannot be made of the text, or a server does not respond.
    """
    document = make_document(sentences, tokens, number, reader.count, settings.seed)
    read = reader.read(document.text)
    tasks: dict[str, list[Line]] = {task: [] for task in settings.tasks}
    questions = [question for question in document.questions if question.task in tasks]
    for question, response in zip(questions, reader.ask(questions), strict=True):
        nats = response.nats(question)
        entry = {
            "among": response.right_among(question),
            "nats": None if nats is None else round(nats, 4),
            "text": response.right_text(question),
            "depth": question.depth,
            "choices": len(set(question.choices)),
        }
        tasks[question.task].append(entry | ({"hops": question.hops} if question.task == "tracking" else {}))
    heads = reader.heads()
    return {
        "model": subject.name,
        "length": tokens,
        "document": number,
        "tokens": read.tokens,
        "tasks": tasks,
        "losses": None if read.losses is None else _by_position(read.losses),
        "heads": None if heads is None else [[[round(value, 4) for value in row] for row in part] for part in heads],
    }


def _by_position(losses: torch.Tensor) -> list[Line]:
    """Return sums of cross entropies in nats over the positions up to 256, and from there up to 512, 1024, ...

    An entry has to (the bound, even if the losses end before), sum and count (the number of losses).
    """
    found, start, end = [], 0, 256
    while start < len(losses):
        part = losses[start:end].double()
        found.append({"to": end, "sum": round(part.sum().item(), 3), "count": len(part)})
        start, end = end, 2 * end
    return found
