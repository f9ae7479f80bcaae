"""Scores of pairs of texts: `/v1/score` and `/v1/rerank`, as vLLM, Jina and Cohere have them.

A cross-encoder reads both texts of a pair together. With a model that makes embeddings, the score of a pair is the
cosine of the embeddings of its texts.
"""

import time
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, Field

from sharp.core.manifest import Classification
from sharp.serving.api.encoding import EncodeRequest, Text
from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.engine.served_model import TextEncoder
from sharp.serving.frontends.http.encoder_request import MOST_INPUTS, EncoderRequest, unit, usage
from sharp.serving.frontends.json_fields import FAIL_FAST, NULL_IS_UNSET, Flag, StrictMessage, WholeNumber, one_of

TEXTS = one_of("a text or a list of texts")
Texts = Annotated[str | Annotated[list[str], FAIL_FAST], TEXTS]


class ScoreRequest(EncoderRequest):
    """The body of `/v1/score`; each field has three names in vLLM."""

    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[Texts, Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))]

    def encode_request(self, model: TextEncoder, request_id: str) -> EncodeRequest:
        """Return the pairs for a cross-encoder, or all texts for a model that makes embeddings.

        Raises:
            InputError: the model gives no scores.
            FieldError: there are no texts, too many, or not as many in `text_1` as in `text_2`.
        """
        first, second = (([texts] if isinstance(texts, str) else texts) for texts in (self.text_1, self.text_2))
        return self._encode(request_id, "text_2", texts=inputs_of_pairs(model, {"text_1": first, "text_2": second}))

    def body(self, model: TextEncoder, request_id: str, values: NDArray[np.float32], tokens: int) -> dict[str, Any]:
        """Return the response's JSON object with the score of each pair of texts.

        `values` are the model's outputs, a row per text, and `tokens` is the number of tokens that were read.
        """
        first = 1 if isinstance(self.text_1, str) else len(self.text_1)
        scores = enumerate(scores_of_pairs(model, values, first, activate=self.use_activation is not False))
        return {
            "id": f"score-{request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model.manifest.name,
            "data": [{"index": index, "object": "score", "score": score} for index, score in scores],
            "usage": usage(tokens),
        }


class Document(StrictMessage):
    """A document of a `/v1/rerank` request in the form of Jina and Cohere, an object with a text."""

    text: str


class RerankRequest(EncoderRequest):
    """The body of `/v1/rerank`."""

    query: str
    documents: Annotated[
        Annotated[list[str], FAIL_FAST] | Annotated[list[Document], FAIL_FAST],
        one_of("a list of texts, or of objects with a text"),
    ]
    top_n: Annotated[WholeNumber, NULL_IS_UNSET] = 0
    return_documents: Flag = True

    def encode_request(self, model: TextEncoder, request_id: str) -> EncodeRequest:
        """Return the query with each document for a cross-encoder, or all texts for a model that makes embeddings.

        Raises:
            InputError: the model gives no scores.
            FieldError: there are no documents or too many, or `top_n` is negative.
        """
        if self.top_n < 0:
            raise FieldError("top_n", f"top_n is {self.top_n}; it must be at least 0, which is all")
        inputs = inputs_of_pairs(model, {"query": [self.query], "documents": self._texts})
        return self._encode(request_id, "documents", texts=inputs)

    @property
    def _texts(self) -> list[str]:
        """The texts of the documents, in their order."""
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def body(self, model: TextEncoder, request_id: str, values: NDArray[np.float32], tokens: int) -> dict[str, Any]:
        """Return the response's JSON object with the `top_n` best documents, the best first.

        `values` are the model's outputs, a row per text, and `tokens` is the number of tokens that were read.
        """
        documents = self._texts
        scores = scores_of_pairs(model, values, 1, activate=self.use_activation is not False)
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


def inputs_of_pairs(model: TextEncoder, fields: Mapping[str, list[str]]) -> list[Text]:
    """Return the pairs for a cross-encoder, or the texts of both fields for a model that makes embeddings.

    `fields` are the first and the second texts under the names that the request has for them; one first text is paired
    with every second text.

    Raises:
        InputError: the model gives no scores.
        FieldError: there are no texts, too many, or not as many first as second ones.
    """
    for name, texts in fields.items():
        if not texts:
            raise FieldError(name, f"{name} is an empty list; give at least one text")
        if len(texts) > MOST_INPUTS:
            raise FieldError(name, f"{name} has {len(texts)} entries; the limit is {MOST_INPUTS}")
    (_, first), (field, second) = fields.items()
    if len(first) not in (1, len(second)):
        raise FieldError(field, f"{field} has {len(second)} texts for {len(first)} others; give one, or as many")
    if model.embedding is not None:
        return [*first, *second]
    check_one_label(model)
    return list(zip(first if len(first) == len(second) else first * len(second), second, strict=True))


def scores_of_pairs(model: TextEncoder, values: NDArray[np.float32], first: int, *, activate: bool) -> list[float]:
    """Return the score of each pair; `first` is the number of first texts among the embeddings in `values`.

    `activate` applies the model's activation to the scores of a classification head.
    """
    if model.embedding is None:
        assert model.manifest.classification is not None
        scored = activated(values[:, 0].astype(np.float64), model.manifest.classification, on=activate)
    else:
        rows = unit(values)
        scored = (rows[:first] * rows[first:]).sum(axis=1)
    numbers: list[float] = scored.tolist()
    return numbers


def check_one_label(model: TextEncoder) -> None:
    """Refuse a classifier whose logits are no score.

    Raises:
        InputError: the classifier has several labels.
    """
    head = model.manifest.classification
    if head is None or len(head.labels) != 1:
        count = 0 if head is None else len(head.labels)
        raise InputError(f"{model.manifest.name} tells {count} labels apart; scores need a model with one")


def activated(logits: NDArray[np.float64], head: Classification, *, on: bool) -> NDArray[np.float64]:
    """Return the scores of one label's logits, as sentence-transformers makes them; the logits if not `on`."""
    if not on or head.activation == "identity":
        return logits
    return 0.5 * (1 + np.tanh(logits / 2))  # the sigmoid; the softmax of one label is always 1
