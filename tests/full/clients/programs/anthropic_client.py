"""anthropic: messages, streams, count_tokens, tools, errors."""

import sys

import anthropic

BASE, MODEL, _ = sys.argv[1:]
client = anthropic.Anthropic(base_url=BASE, api_key="-", max_retries=0)
GREEDY = {"temperature": 0}
messages = [{"role": "user", "content": "a"}]
assert client.messages.create(model=MODEL, max_tokens=3, messages=messages, extra_body=GREEDY).content[0].text == "bcd"
with client.messages.stream(model=MODEL, max_tokens=3, messages=messages, extra_body=GREEDY) as stream:
    assert "".join(stream.text_stream) == "bcd"
tools = [{"name": "f", "input_schema": {"type": "object", "additionalProperties": False}}]
choice = {"type": "any", "disable_parallel_tool_use": True}
response = client.messages.create(
    model=MODEL, max_tokens=80, messages=messages, tools=tools, tool_choice=choice, extra_body=GREEDY
)
assert (response.content[0].name, response.stop_reason) == ("f", "tool_use")
assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens == 1
try:
    client.messages.create(model="other", max_tokens=3, messages=messages)
except anthropic.NotFoundError:
    pass
else:
    raise AssertionError("no NotFoundError")
print("messages, stream, count_tokens, tools, errors")
