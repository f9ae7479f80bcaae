"""The models and settings of `sharp evaluate`. This module imports no torch, so wrong options are refused at once."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sharp.core.errors import InputError
from sharp.core.failed_connection import check_no_address, is_url
from sharp.core.http_connection import HttpConnection
from sharp.core.manifest import MANIFEST_FILE
from sharp.exporter.checkpoints.path_checks import check_exists, check_fits
from sharp.exporter.long_context.documents import LEAST_TOKENS, TASKS

Form = Literal["auto", "chat", "plain"]
KINDS = "a Hugging Face folder, a .gguf file, a folder of sharp-export, or the URL of an OpenAI-compatible server"
CONTROLS = "temperature=FACTOR, log-n=TOKENS or yarn=FACTOR"
LONGEST = 2**20
KEY = "OPENAI_API_KEY"  # the variable of a server's key
SECONDS = 600.0  # that a server's response may take
ADAPTED = "sharp_adapted"  # model_type in config.json; the module that defines it imports torch


@dataclass(frozen=True)
class EvaluateSettings:
    """The user's settings; the fields are the options of `sharp evaluate`.

    Attributes:
        lengths: tokens of the documents, each from 512 to 1,048,576.
        tasks: kinds of questions, of `TASKS`.
        documents: the number of documents of every length.
        text: files and folders of the natural text; none: the documentation of Python.
        form: the form of the questions; "auto" is "chat" where the model has a chat template, otherwise "plain".
        seed: the seed of the documents.
        device: "auto", "cpu" or "cuda", for checkpoints.
        threads: the number of CPU threads; 0 is all.

    Raises:
        InputError: a field is out of range; the message names the option.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    tasks: tuple[str, ...] = TASKS
    documents: int = 24
    text: tuple[Path, ...] = ()
    form: Form = "auto"
    seed: int = 0
    device: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or not all(LEAST_TOKENS <= length <= LONGEST for length in self.lengths):
            raise InputError(f"--lengths must be numbers from {LEAST_TOKENS} to {LONGEST}, as 512,1k,2k")
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise InputError(f"--tasks has {unknown[0]!r}, but must be some of: {', '.join(TASKS)}")
        if not self.tasks:
            raise InputError(f"--tasks is empty, but must be some of: {', '.join(TASKS)}")
        for name, least, most in (("documents", 1, 10_000), ("seed", 0, 2**31), ("threads", 0, 1024)):
            if not least <= getattr(self, name) <= most:
                raise InputError(f"--{name} is {getattr(self, name)}, but must be from {least} to {most}")


def settings_record(settings: EvaluateSettings) -> dict[str, Any]:
    """Return the settings as values for JSON."""
    return {**asdict(settings), "text": [str(path) for path in settings.text]}


@dataclass(frozen=True)
class Control:
    """A change of a softmax model without training; `value` is its number.

    | kind | change |
    | --- | --- |
    | temperature | all logits times `value` |
    | log-n | logits times max(1, ln n / ln `value`), n the number of visible keys |
    | yarn | rotary positions for a context `value` times as long (Peng et al. 2023) |
    """

    kind: str
    value: float

    @property
    def name(self) -> str:
        """The control as the user writes it, KIND=NUMBER."""
        return f"{self.kind}={self.value:g}"


def parse_control(text: str) -> Control:
    """Parse a control such as temperature=1.1.

    Raises:
        InputError: the text is no control, or its number is out of range: temperature from 0.01 to 100, log-n from 2 to
            2^24, yarn from 1 to 1,024.
    """
    kind, _, number = text.partition("=")
    limits = {"temperature": (0.01, 100.0), "log-n": (2.0, 2.0**24), "yarn": (1.0, 1024.0)}
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if kind not in limits or not limits[kind][0] <= value <= limits[kind][1]:
        raise InputError(f"--control is {text!r}, but must be {CONTROLS}, as temperature=1.1")
    return Control(kind, value)


@dataclass(frozen=True)
class Subject:
    """A model to evaluate, or a control of a model; tables show it by its `name`.

    `source` is the path or URL as the user gave it.
    """

    source: str
    control: Control | None = None

    @property
    def name(self) -> str:
        """The last part of the path, or the URL, followed by the control."""
        own = self.source if is_url(self.source) else Path(self.source).resolve().name
        return own if self.control is None else f"{own} {self.control.name}"


def check_subjects(subjects: Sequence[Subject], settings: EvaluateSettings) -> None:
    """Check every MODEL, its control and the form of the questions, before a model is opened.

    Raises:
        NotFoundError: a path does not exist.
        InputError: a MODEL is none of `KINDS`, a control or the form does not apply to it, or two have the same name.
        SharpError: no server responds at a URL.
    """
    for subject in subjects:
        _check_source(subject.source)
        if subject.control is not None and not is_checkpoint(subject.source):
            raise InputError(
                f"--control {subject.control.name} is for checkpoints, and {subject.source} is none; give the folder "
                "or .gguf file that it was made from"
            )
        if subject.control is not None and _is_adapted(Path(subject.source)):
            raise InputError(
                f"{subject.source} was adapted; --control {subject.control.name} is for softmax models: give the "
                "model that it was made from first"
            )
        if settings.form == "chat" and is_url(subject.source):
            raise InputError(f"--form chat is for models that run here, not for {subject.source}; leave it out")
    if len({subject.name for subject in subjects}) < len(subjects):
        raise InputError("two models have the same name, which the page needs; rename a folder")


def is_checkpoint(source: str) -> bool:
    """Whether a MODEL that `check_subjects` accepts is a Hugging Face folder or a .gguf file (no URL, no manifest)."""
    return not is_url(source) and not (Path(source) / MANIFEST_FILE).is_file()


def _is_adapted(path: Path) -> bool:
    """Whether `sharp adapt` wrote a folder. A config.json that is no JSON is refused later, by opening the model."""
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("model_type") == ADAPTED


def _check_source(source: str) -> None:
    """Check that a server responds, or that a file or folder is a model and fits into memory; else raise SharpError."""
    check_no_address(source)
    if is_url(source):
        HttpConnection(source, token=os.environ.get(KEY), seconds=SECONDS).check_responds()
        return
    path = Path(source)
    check_exists(path, KINDS)
    whole = (path / "config.json").is_file() or (path / MANIFEST_FILE).is_file()
    if not (whole if path.is_dir() else path.suffix == ".gguf"):
        raise InputError(f"{path} is not a model that sharp evaluate reads; give {KINDS}")
    check_fits(path)
