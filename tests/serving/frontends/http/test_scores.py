"""`/v1/score` and `/v1/rerank` equal sentence-transformers' `CrossEncoder`, and cosines of embeddings."""

import json

import numpy as np
import pytest

from tests.sentence_encoders import export_encoder, save_encoder, save_sentence_encoder
from tests.serving.frontends.http.test_embeddings import post

QUERY = "who may use the work"
DOCUMENTS = ["the work of a contributor", "a", "you may use the work, and derivative works, as the license says", ""]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    base = tmp_path_factory.mktemp("encoders")
    return {
        "cross": save_encoder(base / "cross", labels=1),
        "labels": save_encoder(base / "labels", labels=3),
        "bi": save_sentence_encoder(base / "bi", normalize=False),
    }


@pytest.fixture(scope="module")
def server(start_server, checkpoints):
    return start_server(export_encoder(checkpoints["cross"]))


@pytest.fixture(scope="module")
def bi_server(start_server, checkpoints):
    return start_server(export_encoder(checkpoints["bi"]))


@pytest.fixture(scope="module")
def reference(checkpoints):
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(checkpoints["cross"]), device="cpu")


def test_scores_are_those_of_a_cross_encoder(server, reference):
    expected = reference.predict([(QUERY, document) for document in DOCUMENTS])
    status, body = post(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert status == 200
    assert np.abs(np.array([entry["score"] for entry in body["data"]]) - expected).max() < 1e-5
    _, again = post(server, "/score", queries=[QUERY] * 4, documents=DOCUMENTS)
    assert again["data"] == body["data"]
    _, raw = post(server, "/score", text_1=QUERY, text_2=DOCUMENTS[0], use_activation=False)
    assert 1 / (1 + np.exp(-raw["data"][0]["score"])) == pytest.approx(expected[0], abs=1e-5)


def test_documents_come_in_the_order_of_their_scores(server, reference):
    expected = reference.rank(QUERY, DOCUMENTS)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        _, body = post(server, path, query=QUERY, documents=DOCUMENTS, top_n=3)
        assert [result["index"] for result in body["results"]] == [entry["corpus_id"] for entry in expected[:3]]
        assert body["results"][0]["document"] == {"text": DOCUMENTS[expected[0]["corpus_id"]]}
        scores = [result["relevance_score"] for result in body["results"]]
        assert np.abs(np.array(scores) - [entry["score"] for entry in expected[:3]]).max() < 1e-5
    _, body = post(server, "/rerank", query=QUERY, documents=[{"text": "a"}], return_documents=False)
    assert body["results"][0].keys() == {"index", "relevance_score"}


def test_a_model_of_embeddings_scores_by_their_cosine(bi_server, checkpoints):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(checkpoints["bi"]), device="cpu")
    expected = model.similarity(model.encode([QUERY]), model.encode(DOCUMENTS))[0].numpy()
    _, body = post(bi_server, "/v1/score", text_1=[QUERY], text_2=DOCUMENTS)
    assert np.abs(np.array([entry["score"] for entry in body["data"]]) - expected).max() < 1e-5
    _, body = post(bi_server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert [result["index"] for result in body["results"]] == np.argsort(-expected, kind="stable").tolist()


def test_a_long_pair_is_refused_or_cut(server, reference):
    long = "the work " * 200
    status, error = post(server, "/rerank", query=QUERY, documents=["a", long])
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "documents")
    _, body = post(server, "/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=-1)
    assert body["data"][0]["score"] == pytest.approx(float(reference.predict([(QUERY, long)])[0]), abs=1e-5)
    assert body["usage"]["prompt_tokens"] == 128


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/score", {"text_1": "a"}, "text_2 cannot be used: Field required"),
        ("/score", {"text_1": [], "text_2": ["a"]}, "text_1 is an empty list"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2 has 1 texts for 2 others"),
        ("/score", {"text_1": "a", "text_2": [1]}, "text_2 cannot be used"),
        ("/rerank", {"query": "a", "documents": []}, "documents is an empty list"),
        ("/rerank", {"query": ["a"], "documents": ["a"]}, "query cannot be used"),
        ("/rerank", {"query": "a", "documents": "a"}, "documents cannot be used"),
        ("/rerank", {"query": "a", "documents": [{}]}, "documents cannot be used"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents has 2049 entries; the limit is 2048"),
        ("/rerank", {"query": "q" * 400_000, "documents": ["a"] * 2048}, "documents has 819202048 characters"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n is -1"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": 1e400}, "top_n cannot be used"),
        ("/v1/embeddings", {"input": "a"}, "cross-model scores pairs of texts and has no embeddings"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(server, path, body, message):
    status, error = post(server, path, **body)
    assert status == 400, error
    assert message in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.full
def test_a_classifier_of_several_labels_has_no_score(start_server, checkpoints):
    folder = export_encoder(checkpoints["labels"])
    classification = json.loads((folder / "sharp.json").read_text())["classification"]
    assert classification == {"labels": ["LABEL_0", "LABEL_1", "LABEL_2"], "activation": "softmax"}
    server = start_server(folder)
    status, error = post(server, "/score", text_1="a", text_2="b")
    assert (status, error["message"]) == (400, "labels-model tells 3 labels apart; scores need a model with one")
