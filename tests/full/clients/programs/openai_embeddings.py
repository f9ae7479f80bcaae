"""openai: embeddings of texts and of token ids, as base64 and as numbers, their usage, and errors."""

import sys

import openai

BASE, MODEL, _ = sys.argv[1:]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="-", max_retries=0)
assert [model.id for model in client.models.list()] == [MODEL]
texts = ["a licence", "the terms of the licence", ""]
response = client.embeddings.create(model=MODEL, input=texts)  # base64, which the package decodes
assert [embedding.index for embedding in response.data] == [0, 1, 2] and response.usage.prompt_tokens > 0
numbers = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")


def alike(left, right):
    return all(abs(a - b) < 1e-6 for a, b in zip(left, right, strict=True))


assert all(alike(a.embedding, b.embedding) for a, b in zip(response.data, numbers.data, strict=True))
assert alike(client.embeddings.create(model=MODEL, input=texts[0]).data[0].embedding, response.data[0].embedding)
ids = client.embeddings.create(model=MODEL, input=[[2, 9, 3]])
assert len(ids.data[0].embedding) == len(response.data[0].embedding) and ids.usage.prompt_tokens == 3
for wrong in ({"model": "other"}, {"dimensions": 7}, {"input": "a " * 500}):
    try:
        client.embeddings.create(**{"model": MODEL, "input": "a", **wrong})
    except openai.APIStatusError as error:
        assert error.status_code in (400, 404), error
    else:
        raise AssertionError(wrong)
try:
    client.completions.create(model=MODEL, prompt="a")
except openai.BadRequestError as error:
    assert "is an encoder" in error.message
print("embeddings of texts and token ids, Base64 and numbers, errors")
