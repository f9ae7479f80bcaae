"""openai: completions, chats, streams, tools, JSON, the Responses API, models, errors."""

import json
import sys

import openai

BASE, MODEL, _ = sys.argv[1:]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="-", max_retries=0)
messages = [{"role": "user", "content": "a"}]
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}}
assert [model.id for model in client.models.list()] == [MODEL]
assert client.completions.create(model=MODEL, prompt="a", temperature=0, max_tokens=3).choices[0].text == "bcd"
chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_completion_tokens=3)
assert chat.choices[0].message.content == "bcd"
stream = client.chat.completions.create(
    model=MODEL, messages=messages, temperature=0, max_tokens=3, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "bcd"
assert chunks[-1].usage.completion_tokens == 3
call = client.chat.completions.create(
    model=MODEL, messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=0
)
assert call.choices[0].message.tool_calls[0].function.name == "f"
form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
number = client.chat.completions.create(model=MODEL, messages=messages, response_format=form, temperature=0)
assert json.loads(number.choices[0].message.content) in (1, 2)
response = client.responses.create(model=MODEL, input="a", temperature=0, max_output_tokens=3)
assert response.output_text == "bcd"
kinds = [event.type for event in client.responses.create(model=MODEL, input="a", max_output_tokens=3, stream=True)]
assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
long = [{"role": "user", "content": "x" * 300}]
for cause, code in (({"model": "other"}, "model_not_found"), ({"messages": long}, "context_length_exceeded")):
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": messages, **cause})
    except openai.APIStatusError as error:
        assert error.code == code
    else:
        raise AssertionError(code)
print("models, completions, chat, streams with usage, tools, JSON schema, responses, errors")
