"""Scores of pairs of texts: `/v1/score` and `/v1/rerank`, as vLLM, Jina and Cohere have them.

A cross-encoder reads both texts of a pair together. Of a model that makes embeddings, the score of a pair is the cosine
of theirs.
"""

import time
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, Field

from sharp.plugins.manifest import Classification
from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.api.sampling_fields import FAIL_FAST, NULL_IS_UNSET, Flag, StrictMessage, WholeNumber, one_of
from sharp.serving.encoder.folder import EncoderFolder
from sharp.serving.frontends.http.encoder_request import MOST_INPUTS, EncoderRequest, unit, usage

TEXTS = one_of("a text or a list of texts")
Texts = Annotated[str | Annotated[list[str], FAIL_FAST], TEXTS]


class PairRequest(EncoderRequest):
    """A request for the scores of pairs, one first text for all second texts or one for each."""

    def pairs(self) -> tuple[list[str], list[str]]:
        """The first texts and the second ones; every route has its own fields for them."""
        raise NotImplementedError

    def encode_request(self, model: EncoderFolder, request_id: str) -> EncodeRequest:
        """See `EncoderRequest`."""
        first, second = self.pairs()
        field = self.names[1]
        for name, texts in zip(self.names, (first, second), strict=True):
            if not texts:
                raise FieldError(name, f"{name} is an empty list; give at least one text")
            if len(texts) > MOST_INPUTS:
                raise FieldError(name, f"{name} has {len(texts)} entries; the limit is {MOST_INPUTS}")
        if len(first) not in (1, len(second)):
            raise FieldError(field, f"{field} has {len(second)} texts for {len(first)} others; give one, or as many")
        if model.embedding is not None:
            return self._encode(request_id, field, texts=[*first, *second])
        check_one_label(model)
        each = first if len(first) == len(second) else first * len(second)
        return self._encode(request_id, field, texts=list(zip(each, second, strict=True)))

    @property
    def names(self) -> tuple[str, str]:
        """The fields of the first and the second texts; every route has its own."""
        raise NotImplementedError

    def scores(self, model: EncoderFolder, values: NDArray[np.float32]) -> list[float]:
        """The score of each pair."""
        if model.embedding is None:
            assert model.manifest.classification is not None
            logits = values[:, 0].astype(np.float64)
            scored = activated(logits, model.manifest.classification, on=self.use_activation is not False)
        else:
            rows = unit(values)
            first = len(self.pairs()[0])
            scored = (rows[:first] * rows[first:]).sum(axis=1)
        numbers: list[float] = scored.tolist()
        return numbers


class ScoreRequest(PairRequest):
    """The body of `/v1/score`; each field has three names in vLLM."""

    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[Texts, Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))]

    @property
    def names(self) -> tuple[str, str]:
        """See `PairRequest`."""
        return "text_1", "text_2"

    def pairs(self) -> tuple[list[str], list[str]]:
        """See `PairRequest`."""
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        return first, second

    def body(self, model: EncoderFolder, request_id: str, values: NDArray[np.float32], tokens: int) -> dict[str, Any]:
        """See `EncoderRequest`."""
        scores = enumerate(self.scores(model, values))
        return {
            "id": f"score-{request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model.manifest.name,
            "data": [{"index": index, "object": "score", "score": score} for index, score in scores],
            "usage": usage(tokens),
        }


class Document(StrictMessage):
    """A document as Jina and Cohere write it, too."""

    text: str


class RerankRequest(PairRequest):
    """The body of `/v1/rerank`."""

    query: str
    documents: Annotated[
        Annotated[list[str], FAIL_FAST] | Annotated[list[Document], FAIL_FAST],
        one_of("a list of texts, or of objects with a text"),
    ]
    top_n: Annotated[WholeNumber, NULL_IS_UNSET] = 0
    return_documents: Flag = True

    @property
    def names(self) -> tuple[str, str]:
        """See `PairRequest`."""
        return "query", "documents"

    def pairs(self) -> tuple[list[str], list[str]]:
        """See `PairRequest`."""
        if self.top_n < 0:
            raise FieldError("top_n", f"top_n is {self.top_n}; it must be at least 0, which is all")
        return [self.query], [one if isinstance(one, str) else one.text for one in self.documents]

    def body(self, model: EncoderFolder, request_id: str, values: NDArray[np.float32], tokens: int) -> dict[str, Any]:
        """See `EncoderRequest`."""
        scores, (_, documents) = self.scores(model, values), self.pairs()
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n or None]
        return {
            "id": f"rerank-{request_id}",
            "model": model.manifest.name,
            "usage": usage(tokens),
            "results": [
                {
                    "index": index,
                    **({"document": {"text": documents[index]}} if self.return_documents else {}),
                    "relevance_score": scores[index],
                }
                for index in best
            ],
        }


def check_one_label(model: EncoderFolder) -> None:
    """Refuse a classifier whose logits are no score.

    Raises:
        InputError: it has several labels.
    """
    head = model.manifest.classification
    if head is None or len(head.labels) != 1:
        count = 0 if head is None else len(head.labels)
        raise InputError(f"{model.manifest.name} tells {count} labels apart; scores need a model with one")


def activated(logits: NDArray[np.float64], head: Classification, *, on: bool) -> NDArray[np.float64]:
    """Scores of the logits of one label, as sentence-transformers makes them; the logits themselves where it is off."""
    if not on or head.activation == "identity":
        return logits
    return 0.5 * (1 + np.tanh(logits / 2))  # the sigmoid, which softmax of one label is not
