"""langchain-openai: OpenAIEmbeddings, with the option that keeps it from sending tokens of OpenAI's own vocabulary."""

import sys

from langchain_openai import OpenAIEmbeddings

BASE, MODEL, _ = sys.argv[1:]
embeddings = OpenAIEmbeddings(base_url=f"{BASE}/v1", api_key="-", model=MODEL, check_embedding_ctx_length=False)
one, other = embeddings.embed_documents(["a licence", "a patent"])
query = embeddings.embed_query("a licence")
assert max(abs(a - b) for a, b in zip(query, one, strict=True)) < 1e-6 < max(map(abs, other))
print("OpenAIEmbeddings (check_embedding_ctx_length=False): embed_query, embed_documents")
