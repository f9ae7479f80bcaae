"""The protocols of a loaded model: `ServedModel` for every kind of model, and a protocol for each ability."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sharp.core.errors import InputError
from sharp.core.manifest import Embedding, Manifest, Port
from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.api.request import GenerateRequest, Request
from sharp.serving.api.tensors import TensorRequest
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.text.tokenizer import Tokenizer


class TextGenerator(Protocol):
    """A model that completes prompts. Thread-safe."""

    @property
    def sampling(self) -> Mapping[str, float]:
        """The defaults of sampling parameters that a request leaves out."""

    @property
    def guides(self) -> GuideCompiler:
        """The compiler of schemas and grammars that completions must match."""

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """Return the checked request, ready for the engine. This may take long, so do not call it in the event loop.

        Raises:
            FieldError: a field cannot be used; the message names the field, its value and the limit.
            QueueFullError: too many grammars wait to be compiled.
            EngineError, UnavailableError: the process that compiles grammars does not start, or was ended.
        """


class TextEncoder(Protocol):
    """A model that turns texts into embeddings or scores. Thread-safe."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the folder."""

    @property
    def embedding(self) -> Embedding | None:
        """The description of embeddings; None for a model with a classification head."""

    def prepare_encoding(self, request: EncodeRequest) -> EncodeRequest:
        """Return the checked request, ready for the engine. This may take long, so do not call it in the event loop.

        Raises:
            FieldError: an input has no tokens, too many tokens (`ContextLengthError`), or a token that the model does
                not have, the texts are too long together, the tokenizer fails at a text, or `truncate` is out of range;
                the message names the field.
        """


class TensorFunction(Protocol):
    """A model of sets or of numbers, whose requests bring its input tensors. Thread-safe."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The input tensors, all of float32."""

    @property
    def output(self) -> Port:
        """The output tensor, of float32."""

    @property
    def length_name(self) -> str:
        """The name of the dimension that attention runs over: the items of a set, or the length of a sequence."""

    def prepare_tensors(self, request: TensorRequest) -> TensorRequest:
        """Return the checked request, ready for the engine. `request.inputs` must have all inputs of the model.

        Raises:
            FieldError: an input has another shape than the model's, too many rows or items, or numbers that are not
                finite.
        """


@dataclass(frozen=True)
class Abilities:
    """The one ability that a model has.

    Attributes:
        generator: the model as one that completes prompts.
        encoder: the model as an encoder.
        tensors: the model as a function of tensors.
        instead: how to use a model that generates no text, as a sentence for clients that send it a prompt.
    """

    generator: TextGenerator | None = None
    encoder: TextEncoder | None = None
    tensors: TensorFunction | None = None
    instead: str = ""

    def require_generator(self) -> TextGenerator:
        """Return the model as one that completes prompts.

        Raises:
            InputError: the model generates no text.
        """
        if self.generator is None:
            raise InputError(self.instead)
        return self.generator


class ServedModel(Protocol):
    """A loaded model of any kind, as requests see it. Thread-safe."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the folder, with the name under which the model is served."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the model has none, or reads no text."""

    @property
    def abilities(self) -> Abilities:
        """The ability of this kind of model."""

    @property
    def context_limit(self) -> int:
        """The maximum number of tokens of a sequence, or of items of a row."""

    @property
    def request_limit(self) -> int:
        """The maximum number of tokens or items of one request."""

    @property
    def token_bytes(self) -> int:
        """The maximum number of bytes per token or item in a request's message."""

    def probe(self) -> Request:
        """Return a request of one token or item that belongs to no client, for health checks."""
