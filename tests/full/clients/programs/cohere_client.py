"""cohere: rerank, by both versions of its API."""

import sys

import cohere

BASE, MODEL, _ = sys.argv[1:]
documents = ["the licence", "a work that is based on the work", "a patent"]
first = cohere.Client(base_url=BASE, api_key="-").rerank(model=MODEL, query="licence", documents=documents)
second = cohere.ClientV2(base_url=BASE, api_key="-").rerank(model=MODEL, query="licence", documents=documents, top_n=2)
assert sorted(one.index for one in first.results) == [0, 1, 2]
scores = [one.relevance_score for one in first.results]
assert scores == sorted(scores, reverse=True)
assert [one.index for one in second.results] == [one.index for one in first.results[:2]]
try:
    cohere.ClientV2(base_url=BASE, api_key="-").rerank(model="other", query="licence", documents=documents)
except cohere.core.ApiError as error:
    assert error.status_code == 404
print("rerank (v1, v2), top_n, errors")
