"""litellm: embeddings and reranking through its providers openai, hosted_vllm, cohere and jina_ai."""

import sys

import litellm

BASE, MODEL, _ = sys.argv[1:]
texts = ["a licence", "a patent"]
for provider in ("openai", "hosted_vllm"):
    found = litellm.embedding(model=f"{provider}/{MODEL}", api_base=f"{BASE}/v1", api_key="-", input=texts)
    assert len(found.data) == 2 and found.usage.prompt_tokens > 0
for provider in ("hosted_vllm", "cohere", "jina_ai"):
    ranked = litellm.rerank(
        model=f"{provider}/{MODEL}", api_base=BASE, api_key="-", query="licence", documents=["patent", "licence"]
    )
    assert [result["index"] for result in ranked.results] == [1, 0]
print("embedding as openai/ and hosted_vllm/, rerank as hosted_vllm/, cohere/ and jina_ai/")
