"""An encoder's model folder, loaded and ready for requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np

from sharp.plugins.errors import InputError
from sharp.plugins.manifest import Embedding, Manifest, Pooling
from sharp.serving.api.encoding import EncodeRequest, Text, TextTokens
from sharp.serving.api.errors import ContextLengthError, DeviceLostError, FieldError
from sharp.serving.api.request import GenerateRequest, new_request_id
from sharp.serving.backends.encoder import EncoderBackend, EncoderBatch
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.encoder.engine import EncoderEngine
from sharp.serving.encoder_config import EncoderConfig
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.engine.loading import longest_context, read_checked
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.text.tokenizer import check_characters, check_token_ids, load_tokenizer

MOST_REQUEST_TOKENS = 300_000  # of all inputs together, as OpenAI's
# Of all texts together, the query of a rerank again with each document: a body of 400 kB was tokenized for minutes.
MOST_REQUEST_CHARACTERS = 2**24
GROUP_CHARACTERS = 2**18  # tokenized at once: texts take 100 times their size meanwhile
WARM_UP_TOKENS = 4
ROUTES = "/v1/embeddings, /v1/rerank and /v1/score"


@dataclass(frozen=True)
class EncoderFolder(ModelFolder):
    """What requests need to know of an encoder. It generates nothing. Safe to share between threads.

    `embedding` is how it makes embeddings, by the folder and the settings; None of one with a classification head.
    """

    embedding: Embedding | None

    @property
    def context_limit(self) -> int:
        """The longest text, in tokens."""
        return self.longest

    @property
    def request_limit(self) -> int:
        """The most tokens of one request."""
        return max(MOST_REQUEST_TOKENS, self.longest)

    def prepare(self, request: GenerateRequest) -> GenerateRequest:  # noqa: ARG002 - of the interface
        """Refuse to generate.

        Raises:
            InputError: always.
        """
        raise InputError(f"{self.manifest.name} is an encoder and generates no text; over HTTP it has {ROUTES}")

    def probe(self) -> EncodeRequest:
        """A request that is nobody's, of one token."""
        return EncodeRequest(request_id=new_request_id(), tokens=(TextTokens((0,)),))

    def prepare_encoding(self, request: EncodeRequest) -> EncodeRequest:
        """The checked request, ready for the engine. Long texts take a while: use another thread.

        Raises:
            FieldError: an input has no token, too many, or one that the model has not; the message names the field.
        """
        field, kept = request.field, self._kept(request.truncate)
        found: list[TextTokens] = []
        total = 0
        characters = sum(len(one) if isinstance(one, str) else sum(map(len, one)) for one in request.texts)
        if characters > MOST_REQUEST_CHARACTERS:
            message = f"{field} has {characters} characters, with all texts of all pairs"
            raise FieldError(field, f"{message}; the limit is {MOST_REQUEST_CHARACTERS}, send several requests")
        try:
            for one in self._tokens(request, kept):
                total += len(one.token_ids)
                self._check(field, one.token_ids, total)
                found.append(one)
        except FieldError as error:
            if error.field != "prompt":
                raise
            raise FieldError(field, str(error).replace("prompt", field)) from error
        return replace(request, tokens=tuple(found))

    def _check(self, field: str, token_ids: Sequence[int], total: int) -> None:
        """Check an input, with which the request has so many tokens in `total`."""
        count = len(token_ids)
        if not count:
            raise FieldError(field, f"{field} has an input of 0 tokens; each must have at least 1")
        if count > self.longest:
            message = f"{field} has an input of {count} tokens; the limit is {self.longest}"
            raise ContextLengthError(field, message, self.longest, count, 0)
        if total > self.request_limit:
            raise FieldError(field, f"{field} has more than {self.request_limit} tokens in all, the limit")
        check_token_ids(field, token_ids, self.manifest)

    def _kept(self, truncate: int | None) -> int | None:
        """The tokens to which longer inputs are cut; None where none is."""
        if truncate is None or 1 <= truncate <= self.longest:
            return truncate
        if truncate != -1:
            limits = f"-1, or from 1 to {self.longest}, the model's limit"
            raise FieldError("truncate_prompt_tokens", f"truncate_prompt_tokens is {truncate}; it must be {limits}")
        return self.longest

    def _tokens(self, request: EncodeRequest, kept: int | None) -> Iterator[TextTokens]:
        """The tokens of the inputs, one after the other; texts are tokenized in groups."""
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
        if self.tokenizer is None:
            raise FieldError("prompt", f"prompt is text, and {self.manifest.name} has no tokenizer; send token ids")
        found = self.tokenizer.encode_texts(
            texts, special_tokens=request.special_tokens, most=kept, cut_left=request.truncate_left
        )
        reads_types = self.manifest.tokenizer.token_types
        return [TextTokens(token_ids, types if reads_types else ()) for token_ids, types in found]


def load_encoder_folder(
    path: Path, backend: BackendConfig, engine: EngineConfig, encoder: EncoderConfig
) -> tuple[EncoderFolder, EncoderBackend, EncoderEngine]:
    """Load the encoder of a folder and make its engine.

    Raises:
        NotFoundError: there is no model folder at `path`.
        InputError: the folder cannot be used, a file is damaged, or the model failed its verification or does not run.
    """
    manifest = read_checked(path, backend)
    if manifest.cache.form != "none" or (manifest.embedding or manifest.classification) is None:
        raise InputError(
            f"{path} holds an encoder with the logits of its tokens, which the server has no use for; export it with "
            "--cache none and --head embedding (or classification)"
        )
    longest = longest_context(manifest, engine)
    tokenizer = load_tokenizer(path, manifest)
    loaded = EncoderBackend.load(path, manifest, backend)
    check_first_text(loaded, manifest)
    embedding = chosen_embedding(manifest.embedding, encoder)
    folder = EncoderFolder(manifest, tokenizer, 0, GuideCompiler(manifest, None), longest, {}, embedding)
    pooling: Pooling = "mean" if embedding is None else embedding.pooling
    return folder, loaded, EncoderEngine(loaded, manifest, pooling, engine)


def chosen_embedding(embedding: Embedding | None, config: EncoderConfig) -> Embedding | None:
    """The folder's, as the settings change it."""
    if embedding is None:
        return None
    if config.pooling != "auto":
        embedding = embedding.model_copy(update={"pooling": cast("Literal['mean', 'cls', 'last']", config.pooling)})
    if config.normalize != "auto":
        embedding = embedding.model_copy(update={"normalize": config.normalize == "on"})
    return embedding


def check_first_text(backend: EncoderBackend, manifest: Manifest) -> None:
    """Compute a short text before anybody is served.

    Raises:
        InputError: it fails, or what it gives is not finite or of another shape than `sharp.json` says.
        DeviceLostError: the GPU is lost, which says nothing of the model.
    """
    count = min(WARM_UP_TOKENS, manifest.max_context)
    tokens = (np.arange(count) % manifest.vocab_size)[None]
    try:
        values = backend.run(EncoderBatch(tokens, np.ones_like(tokens), np.zeros_like(tokens), True)).values
    except DeviceLostError:
        raise
    except Exception as error:  # runtimes have no common exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{manifest.name} does not run: {reason}; export the model again") from error
    if manifest.embedding is not None:
        expected: tuple[int, ...] = (1, count, manifest.embedding.size)
    else:
        expected = (1, len(manifest.classification.labels) if manifest.classification else 0)
    if values.shape != expected:
        raise InputError(
            f"{manifest.name} gives {list(values.shape)} numbers for a text of {count} tokens, and sharp.json "
            f"describes {list(expected)}; export the model again"
        )
    if not np.isfinite(values).all():
        raise InputError(
            f"{manifest.name} gives numbers that are not finite for its first text, so its weights are damaged or "
            "overflow; copy or export the model again, with --dtype float32 if it was float16"
        )
