"""Checked requests of encoders with their responses: the base of all, and `/v1/embeddings`."""

import base64
import time
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sharp.core.manifest import Embedding
from sharp.serving.api.encoding import EncodeRequest, Text
from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.engine.served_model import TextEncoder
from sharp.serving.frontends.foreign_fields import OF_ENCODERS
from sharp.serving.frontends.http.openai_request import MAX_REQUEST_ID
from sharp.serving.frontends.json_fields import FAIL_FAST, NULL_IS_UNSET, RequestBody, WholeNumber, one_of

MOST_INPUTS = 2048  # in one request, the limit of OpenAI's API
LEAST_NORM = 1e-12  # the value that sentence-transformers uses


class EncoderRequest(RequestBody, ABC):
    """The fields that the bodies of all encoder requests share (`/v1/embeddings`, `/v1/score`, `/v1/rerank`).

    Names are OpenAI's and vLLM's. Subclasses make the engine's request from their fields, and the response's body.
    """

    foreign = OF_ENCODERS

    model: Annotated[str, NULL_IS_UNSET] = ""
    request_id: Annotated[str, NULL_IS_UNSET, Field(max_length=MAX_REQUEST_ID)] = ""
    truncate_prompt_tokens: WholeNumber | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None

    @abstractmethod
    def encode_request(self, model: TextEncoder, request_id: str) -> EncodeRequest:
        """Return the request to the engine for the texts or token ids in this body.

        Raises:
            FieldError: a field cannot be used with this model.
        """

    @abstractmethod
    def body(self, model: TextEncoder, request_id: str, values: NDArray[np.float32], tokens: int) -> dict[str, Any]:
        """Return the body of the response, from the engine's `values` [inputs, ...] and the number of `tokens`."""

    def _encode(
        self, request_id: str, field: str, *, texts: list[Text] | None = None, ids: list[list[int]] | None = None
    ) -> EncodeRequest:
        """Return the engine's request for texts or token ids. `field` is the request's field that errors name."""
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

    def encode_request(self, model: TextEncoder, request_id: str) -> EncodeRequest:
        """Return the texts or token ids whose embeddings the engine is to compute.

        Raises:
            InputError: the model has no embeddings.
            FieldError: `input` or `dimensions` cannot be used.
        """
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
            # The type of the field makes all entries of a list the same type; mypy sees the union.
            return self._encode(request_id, "input", texts=self.input)  # type: ignore[arg-type]
        return self._encode(request_id, "input", ids=self.input)

    def body(self, model: TextEncoder, request_id: str, values: NDArray[np.float32], tokens: int) -> dict[str, Any]:
        """Return the body with the embeddings: cut to `dimensions`, and of length 1 if requested or by default.

        `values` are the embeddings [inputs, size], and `tokens` is the number of tokens of all inputs.
        """
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
        """Return an embedding as numbers, or as base64 of little-endian float32."""
        if self.encoding_format == "base64":
            return base64.b64encode(row.astype("<f4").tobytes()).decode()
        numbers: list[float] = row.tolist()
        return numbers


def check_dimensions(dimensions: int | None, embedding: Embedding, name: str) -> None:
    """Check that the first `dimensions` numbers of an embedding are an embedding, too.

    Raises:
        FieldError: the model was not trained for this, or `dimensions` is out of range.
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
    """Return the rows [n, size], scaled to length 1."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    normalized: NDArray[np.float32] = rows / np.maximum(norms, LEAST_NORM)
    return normalized


def usage(tokens: int) -> dict[str, int]:
    """Return the field `usage` as OpenAI's API has it, for inputs of `tokens` tokens in all."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}
