"""cohere: rerank, in both versions of Cohere's API."""

import sys

import cohere

BASE, MODEL, _ = sys.argv[1:]
documents = ["the licence", "a work that is based on the work", "a patent"]
first = cohere.Client(base_url=BASE, api_key="-").rerank(model=MODEL, query="licence", documents=documents)
second = cohere.ClientV2(base_url=BASE, api_key="-").rerank(model=MODEL, query="licence", documents=documents, top_n=2)
assert sorted(result.index for result in first.results) == [0, 1, 2]
scores = [result.relevance_score for result in first.results]
assert scores == sorted(scores, reverse=True)
assert [result.index for result in second.results] == [result.index for result in first.results[:2]]
try:
    cohere.ClientV2(base_url=BASE, api_key="-").rerank(model="other", query="licence", documents=documents)
except cohere.core.ApiError as error:
    assert error.status_code == 404
print("rerank (v1, v2), top_n, errors")
