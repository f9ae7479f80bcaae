"""The requests of an encoder, checked, and their responses: `/v1/embeddings`."""

import base64
import time
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sharp.plugins.manifest import Embedding
from sharp.serving.api.encoding import EncodeRequest, Text
from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.api.sampling_fields import FAIL_FAST, NULL_IS_UNSET, StrictMessage, WholeNumber, one_of
from sharp.serving.encoder.folder import EncoderFolder
from sharp.serving.frontends.http.openai_request import MAX_REQUEST_ID

MOST_INPUTS = 2048  # in one request, as OpenAI's
NO_EFFECT = ("priority", "cache_salt", "mm_processor_kwargs")
LEAST_NORM = 1e-12  # as sentence-transformers'


class EncoderRequest(StrictMessage, ABC):
    """The fields that all have: OpenAI's and vLLM's."""

    model: Annotated[str, NULL_IS_UNSET] = ""
    user: Any = None
    priority: Any = None
    cache_salt: Any = None
    mm_processor_kwargs: Any = None
    request_id: Annotated[str, NULL_IS_UNSET, Field(max_length=MAX_REQUEST_ID)] = ""
    truncate_prompt_tokens: WholeNumber | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None

    @property
    def without_effect(self) -> list[str]:
        """The fields that are set and change nothing, for the log."""
        return [name for name in NO_EFFECT if getattr(self, name) is not None]

    @abstractmethod
    def encode_request(self, model: EncoderFolder, request_id: str) -> EncodeRequest:
        """What the engine is to encode.

        Raises:
            FieldError: a field cannot be used with this model.
        """

    @abstractmethod
    def body(self, model: EncoderFolder, request_id: str, values: NDArray[np.float32], tokens: int) -> dict[str, Any]:
        """The body of the response, from the engine's `values` [inputs, ...] of so many tokens."""

    def _encode(
        self, request_id: str, field: str, *, texts: list[Text] | None = None, ids: list[list[int]] | None = None
    ) -> EncodeRequest:
        return EncodeRequest(
            request_id,
            texts or (),
            ids or (),
            field,
            special_tokens=self.add_special_tokens is not False,
            truncate=self.truncate_prompt_tokens,
            truncate_left=self.truncation_side == "left",
        )


class EmbeddingRequest(EncoderRequest):
    """The body of `/v1/embeddings`."""

    input: Annotated[
        str
        | Annotated[list[int], FAIL_FAST]
        | Annotated[list[str], FAIL_FAST]
        | Annotated[list[Annotated[list[int], FAIL_FAST]], FAIL_FAST],
        one_of("a text, a list of token ids, or a list of texts or of such lists"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: WholeNumber | None = None
    normalize: bool | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None

    def encode_request(self, model: EncoderFolder, request_id: str) -> EncodeRequest:
        """See `EncoderRequest`."""
        name = model.manifest.name
        if model.embedding is None:
            raise InputError(f"{name} scores pairs of texts and has no embeddings; it has /v1/rerank and /v1/score")
        check_dimensions(self.dimensions, model.embedding, name)
        if isinstance(self.input, str):
            return self._encode(request_id, "input", texts=[self.input])
        if not self.input:
            raise FieldError("input", "input is an empty list; give at least one text or token id")
        if isinstance(self.input[0], int):
            return self._encode(request_id, "input", ids=[self.input])
        if len(self.input) > MOST_INPUTS:
            raise FieldError("input", f"input has {len(self.input)} entries; the limit is {MOST_INPUTS}")
        if isinstance(self.input[0], str):
            # A list is of one type throughout, by the field's own; mypy sees the union.
            return self._encode(request_id, "input", texts=self.input)  # type: ignore[arg-type]
        return self._encode(request_id, "input", ids=self.input)

    def body(self, model: EncoderFolder, request_id: str, values: NDArray[np.float32], tokens: int) -> dict[str, Any]:
        """See `EncoderRequest`."""
        assert model.embedding is not None
        asked = self.use_activation if self.normalize is None else self.normalize
        rows = values[:, : self.dimensions]
        if model.embedding.normalize if asked is None else asked:
            rows = unit(rows)
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(row)} for index, row in enumerate(rows)
        ]
        return {
            "id": f"embd-{request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model.manifest.name,
            "data": data,
            "usage": usage(tokens),
        }

    def _written(self, row: NDArray[np.float32]) -> list[float] | str:
        if self.encoding_format == "base64":
            return base64.b64encode(row.astype("<f4").tobytes()).decode()
        numbers: list[float] = row.tolist()
        return numbers


def check_dimensions(dimensions: int | None, embedding: Embedding, name: str) -> None:
    """Check that the first so many dimensions of an embedding are one, too.

    Raises:
        FieldError: they are not, or there are not so many.
    """
    if dimensions in (None, embedding.size):
        return
    if not embedding.matryoshka:
        reason = f"{name} was not trained for it (its config.json has no is_matryoshka)"
        raise FieldError("dimensions", f"dimensions is {dimensions}, and {reason}; leave it out for {embedding.size}")
    if embedding.matryoshka_dimensions and dimensions not in embedding.matryoshka_dimensions:
        allowed = ", ".join(map(str, embedding.matryoshka_dimensions))
        raise FieldError("dimensions", f"dimensions is {dimensions}; it must be one of {allowed}")
    if not 1 <= dimensions <= embedding.size:
        raise FieldError("dimensions", f"dimensions is {dimensions}; it must be from 1 to {embedding.size}")


def unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows [n, size] of length 1."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    normalized: NDArray[np.float32] = rows / np.maximum(norms, LEAST_NORM)
    return normalized


def usage(tokens: int) -> dict[str, int]:
    """As OpenAI has it."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}
