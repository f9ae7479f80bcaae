"""`EncoderFolder`: an encoder's model folder, loaded and ready for requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np

from sharp.core.errors import InputError
from sharp.core.manifest import Embedding, Manifest, Pooling
from sharp.serving.api.encoding import EncodeRequest, Text, TextTokens
from sharp.serving.api.errors import ContextLengthError, FieldError
from sharp.serving.api.request import new_request_id
from sharp.serving.backends.rows import RowBackend
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.encoder.engine import EncoderEngine
from sharp.serving.encoder_config import EncoderConfig
from sharp.serving.engine.first_output import check_first_row
from sharp.serving.engine.loading import longest_context, read_checked
from sharp.serving.engine.served_model import Abilities
from sharp.serving.text.tokenizer import TOKEN_BYTES, Tokenizer, check_characters, check_token_ids, load_tokenizer

MOST_REQUEST_TOKENS = 300_000  # limit for all inputs together, the same as OpenAI's
# Limit for all texts together, where the query of a rerank counts once for each document. Without it, tokenizing a body
# of 400 kB took minutes.
MOST_REQUEST_CHARACTERS = 2**24
# number of characters tokenized at once, because tokenizing takes 100 times the text's size in memory
GROUP_CHARACTERS = 2**18
WARM_UP_TOKENS = 4
ROUTES = "/v1/embeddings, /v1/rerank and /v1/score"


@dataclass(frozen=True)
class EncoderFolder:
    """A loaded encoder as requests see it. Thread-safe.

    `longest` is the length of the longest text, in tokens. `embedding` describes how embeddings are computed, from the
    folder and the settings; None for an encoder with a classification head.
    """

    manifest: Manifest
    tokenizer: Tokenizer | None
    longest: int
    embedding: Embedding | None

    @property
    def context_limit(self) -> int:
        """The length of the longest text, in tokens."""
        return self.longest

    @property
    def request_limit(self) -> int:
        """The maximum number of tokens of one request."""
        return max(MOST_REQUEST_TOKENS, self.longest)

    @property
    def token_bytes(self) -> int:
        """The maximum number of bytes per token in a request's message."""
        return TOKEN_BYTES

    @property
    def abilities(self) -> Abilities:
        """The ability to encode texts."""
        instead = f"{self.manifest.name} is an encoder and generates no text; it has {ROUTES}"
        return Abilities(encoder=self, instead=instead)

    def probe(self) -> EncodeRequest:
        """Return a request of one token that belongs to no client, for health checks."""
        return EncodeRequest(request_id=new_request_id(), tokens=(TextTokens((0,)),))

    def prepare_encoding(self, request: EncodeRequest) -> EncodeRequest:
        """Return the checked request, ready for the engine. This may take long, so do not call it in the event loop.

        Raises:
            FieldError: an input has no tokens, too many tokens (`ContextLengthError`), or a token that the model does
                not have, the texts are too long together, the tokenizer fails at a text, or `truncate` is out of range;
                the message names the field.
        """
        field, kept = request.field, self._kept(request.truncate)
        found: list[TextTokens] = []
        total = 0
        characters = sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in request.texts)
        if characters > MOST_REQUEST_CHARACTERS:
            message = f"{field} has {characters} characters, with all texts of all pairs"
            raise FieldError(field, f"{message}; the limit is {MOST_REQUEST_CHARACTERS}, send several requests")
        try:
            for tokens in self._tokens(request, kept):
                total += len(tokens.token_ids)
                self._check(field, tokens.token_ids, total)
                found.append(tokens)
        except FieldError as error:
            if error.field != "prompt":
                raise
            raise FieldError(field, str(error).replace("prompt", field)) from error
        return replace(request, tokens=tuple(found))

    def _check(self, field: str, token_ids: Sequence[int], total: int) -> None:
        """Check the token ids of one input; `field` is the name of the inputs for messages.

        `total` is the number of tokens of the request up to and including this input.

        Raises:
            ContextLengthError: the input has more tokens than the model reads.
            FieldError: the input has no tokens or an id outside the vocabulary, or the request has too many tokens.
        """
        count = len(token_ids)
        if not count:
            raise FieldError(field, f"{field} has an input of 0 tokens; each must have at least 1")
        if count > self.longest:
            message = f"{field} has an input of {count} tokens; the limit is {self.longest}"
            raise ContextLengthError(field, message, self.longest, count, 0)
        if total > self.request_limit:
            raise FieldError(
                field,
                f"{field} has more than {self.request_limit} tokens in all, the limit; send fewer inputs at a time",
            )
        check_token_ids(field, token_ids, self.manifest)

    def _kept(self, truncate: int | None) -> int | None:
        """Return the number of tokens to which longer inputs are cut, or None if they are refused.

        `truncate` is the number in the request: None refuses, and -1 cuts to the longest input of the model.
        """
        if truncate is None or 1 <= truncate <= self.longest:
            return truncate
        if truncate != -1:
            limits = f"-1, or from 1 to {self.longest}, the model's limit"
            raise FieldError("truncate_prompt_tokens", f"truncate_prompt_tokens is {truncate}; it must be {limits}")
        return self.longest

    def _tokens(self, request: EncodeRequest, kept: int | None) -> Iterator[TextTokens]:
        """Yield the tokens of each input, cut to `kept` tokens if given. Texts are tokenized in groups."""
        for token_ids in request.token_ids:
            cut = len(token_ids) - (kept or len(token_ids))
            yield TextTokens(token_ids if cut <= 0 else token_ids[cut:] if request.truncate_left else token_ids[:kept])
        group: list[Text] = []
        characters = 0
        for number, text in enumerate(request.texts, 1):
            parts = (text,) if isinstance(text, str) else text
            for part in parts:
                check_characters(part, self.longest)
            group.append(text)
            characters += sum(map(len, parts))
            if characters > GROUP_CHARACTERS or number == len(request.texts):
                yield from self._tokenized(group, request, kept)
                group, characters = [], 0

    def _tokenized(self, texts: list[Text], request: EncodeRequest, kept: int | None) -> list[TextTokens]:
        """Tokenize texts or pairs of texts, each cut to `kept` tokens (None: not cut), from the left if requested.

        Raises:
            FieldError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise FieldError("prompt", f"prompt is text, and {self.manifest.name} has no tokenizer; send token ids")
        found = self.tokenizer.encode_texts(
            texts, special_tokens=request.special_tokens, most=kept, cut_left=request.truncate_left
        )
        reads_types = self.manifest.tokenizer.token_types
        return [TextTokens(token_ids, types if reads_types else ()) for token_ids, types in found]


def load_encoder_folder(
    path: Path, backend: BackendConfig, engine: EngineConfig, encoder: EncoderConfig
) -> tuple[EncoderFolder, RowBackend, EncoderEngine]:
    """Load the encoder of a folder and create its engine.

    Raises:
        NotFoundError: there is no model folder at `path`.
        InputError: the folder cannot be used, a file is damaged, or the model failed its verification or does not run.
        DeviceLostError: the GPU is lost.
    """
    manifest = read_checked(path, backend)
    if manifest.cache.form != "none" or (manifest.embedding or manifest.classification) is None:
        raise InputError(
            f"{path} holds an encoder with the logits of its tokens, which the server has no use for; export it with "
            "--cache none and --head embedding (or classification)"
        )
    longest = longest_context(manifest, engine)
    tokenizer = load_tokenizer(path, manifest)
    output = "logits" if manifest.embedding is None else "hidden_states"
    loaded = RowBackend.load(path, manifest, ("input_ids", "attention_mask"), output, backend)
    check_first_text(loaded, manifest)
    embedding = chosen_embedding(manifest.embedding, encoder)
    folder = EncoderFolder(manifest, tokenizer, longest, embedding)
    pooling: Pooling = "mean" if embedding is None else embedding.pooling
    return folder, loaded, EncoderEngine(loaded, manifest, pooling, engine)


def chosen_embedding(embedding: Embedding | None, config: EncoderConfig) -> Embedding | None:
    """Return the folder's embedding, with pooling and normalization as the settings choose; None for None."""
    if embedding is None:
        return None
    if config.pooling != "auto":
        embedding = embedding.model_copy(update={"pooling": cast("Literal['mean', 'cls', 'last']", config.pooling)})
    if config.normalize != "auto":
        embedding = embedding.model_copy(update={"normalize": config.normalize == "on"})
    return embedding


def check_first_text(backend: RowBackend, manifest: Manifest) -> None:
    """Compute a short text before any request is served.

    Raises:
        InputError: the computation fails, or its result is not finite or has another shape than `sharp.json` says.
        DeviceLostError: the GPU is lost, which is not the model's fault.
    """
    count = min(WARM_UP_TOKENS, manifest.max_context)
    tokens = (np.arange(count) % manifest.vocab_size)[None]
    tokens[0, 0] = manifest.vocab_size - 1  # the last token of the vocabulary must have an embedding, too
    inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
    if manifest.embedding is not None:
        expected: tuple[int, ...] = (1, count, manifest.embedding.size)
    else:
        expected = (1, len(manifest.classification.labels) if manifest.classification else 0)
    check_first_row(backend, manifest, inputs, expected, f"a text of {count} tokens")
