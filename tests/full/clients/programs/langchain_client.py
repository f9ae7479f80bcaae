"""langchain-openai: invoke, stream, tools, structured output."""

import sys

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

BASE, MODEL, _ = sys.argv[1:]
common = {"base_url": f"{BASE}/v1", "api_key": "-", "model": MODEL, "temperature": 0, "max_retries": 0}


# The function takes no arguments, because the test's model would write arguments without end.
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "description": "Nothing.", "parameters": EMPTY}}


class Answer(BaseModel, extra="forbid"):
    value: bool


chat = ChatOpenAI(**common, max_tokens=3)
assert chat.invoke("a").content == "bcd"
assert "".join(part.content for part in chat.stream("a")) == "bcd"
long = ChatOpenAI(**common, max_tokens=80)
assert (
    long.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke("a").tool_calls[0]["name"] == "f"
)
assert isinstance(long.with_structured_output(Answer, method="json_schema").invoke("a"), Answer)
assert OpenAI(**common, max_tokens=3).invoke("a") == "bcd"
print("invoke, stream, bind_tools, with_structured_output, completions")
