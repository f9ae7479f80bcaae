"""The result of reading a checkpoint of any format: the model, the tokenizer and the facts of both."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from sharp.core.errors import InputError
from sharp.core.manifest import Classification, Embedding, SamplingDefaults
from sharp.core.output_file import room
from sharp.core.vocabulary import tokens_beyond
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.uncached_model import UncachedModel
from sharp.exporter.sources.unknown_keys import UnusedKeys


@dataclass(frozen=True)
class Source:
    """The model of a checkpoint, and the facts and files that go into the model folder with it.

    `original` is the checkpoint under the norm that it was trained with. It is `model` itself if that has this norm.
    `sha256` is the hexadecimal hash of the checkpoint's files. `write_tokenizer` writes `tokenizer.json` into a folder;
    None without a tokenizer. `write_config` writes transformers' `config.json`, which optimum requires. `task` is the
    name of the task that one of Sharp's own models was trained on, `task_parameters` are its parameters that are no
    defaults. `sampling_source` says for people where `sampling` comes from. `embedding` is set for an encoder without a
    head, `classification` for one with a classification head. `tokens_beyond` are tokens of the tokenizer that the
    model lacks. `no_cache` says why the model cannot have a cache, where being no decoder is not the whole reason.
    """

    name: str
    architecture: str
    sha256: str
    model: Decoder | UncachedModel
    original: Decoder | UncachedModel
    write_tokenizer: Callable[[Path], object] | None
    write_config: Callable[[Path], object] | None = None
    task: str | None = None
    task_parameters: Mapping[str, Any] = field(default_factory=dict)  # only those that are not the task's defaults
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    sampling_source: str | None = None  # the origin of `sampling`, for people
    unused: tuple[UnusedKeys, ...] = ()  # names in the checkpoint that the export does not use
    warnings: tuple[str, ...] = ()  # sentences on what the checkpoint does not say
    embedding: Embedding | None = None  # for an encoder without a head
    classification: Classification | None = None  # for an encoder with a classification head
    token_types: bool = False  # whether the tokenizer returns token types
    tokens_beyond: Mapping[int, str] = field(default_factory=dict)  # tokens of the tokenizer that the model lacks
    no_cache: str | None = None  # why this model cannot have a cache, where being no decoder is not the whole reason

    @property
    def trained(self) -> bool:
        """Whether the checkpoint was trained with the norm that the model now has."""
        return self.original is self.model

    @property
    def learned(self) -> bool:
        """Whether the checkpoint has the parameters of the model's norm, even if some heads have another norm."""
        return self.original.config.norm == self.model.config.norm

    @property
    def reads_text(self) -> bool:
        """Whether the model is a decoder and has a tokenizer."""
        return isinstance(self.model, Decoder) and self.write_tokenizer is not None

    @property
    def reads_tokens(self) -> bool:
        """Whether the inputs of the model are tokens, so that it can use a tokenizer."""
        return isinstance(self.model, Decoder) or self.model.kind == "encoder"

    def checked_tokens(self) -> "Source":
        """Return a copy of this source whose `tokens_beyond` are the tokens of the tokenizer that the model lacks.

        A source without a tokenizer is returned itself.

        Raises:
            InputError: the tokenizer cannot be written, or the model lacks more than added tokens, so that the
                tokenizer is of another model.
        """
        if self.write_tokenizer is None:
            return self
        try:
            with TemporaryDirectory() as folder:
                self.save_tokenizer(Path(folder))
                tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        except OSError as error:
            raise InputError(f"the tokenizer of {self.name} cannot be written: {error}{room(error)}") from error
        where = f"the tokenizer of {self.name}"
        return replace(self, tokens_beyond=tokens_beyond(where, tokenizer, self.model.config.vocab_size))

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer into `folder` as `tokenizer.json`. The source must have one.

        Raises:
            OSError: the tokenizer cannot be written.
        """
        assert self.write_tokenizer is not None
        try:
            self.write_tokenizer(folder)
        except Exception as error:  # tokenizers raises nothing narrower
            raise OSError(f"tokenizer.json: {error}") from error


def sha256(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the concatenated contents of files, in hexadecimal.

    The manifest has this hash, which says from which checkpoint a model folder was made.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
