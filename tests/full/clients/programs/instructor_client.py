"""instructor: an object by tool calls and by JSON schema."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

BASE, MODEL, _ = sys.argv[1:]


class City(BaseModel, extra="forbid"):
    name: Literal["Oslo", "Rome"]
    large: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{BASE}/v1", api_key="-"), mode=mode)
    messages = [{"role": "user", "content": "a"}]
    one = {"parallel_tool_calls": False} if mode is instructor.Mode.TOOLS else {}
    city = client.chat.completions.create(
        model=MODEL, messages=messages, response_model=City, temperature=0, max_retries=0, **one
    )
    assert city.name in ("Oslo", "Rome")
print("response_model with Mode.TOOLS and Mode.JSON_SCHEMA")
