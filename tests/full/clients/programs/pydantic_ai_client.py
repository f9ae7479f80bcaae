"""pydantic-ai: an agent with a tool output, over chats and over responses."""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE, MODEL, _ = sys.argv[1:]
provider = OpenAIProvider(base_url=f"{BASE}/v1", api_key="-")


class City(BaseModel):
    name: Literal["Oslo", "Rome"]


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL, provider=provider)
    settings = {"temperature": 0, "max_tokens": 3}
    assert Agent(model, model_settings=settings).run_sync("a").output == "bcd"
settings = {"temperature": 0, "max_tokens": 80, "parallel_tool_calls": False}
city = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=City, model_settings=settings).run_sync("a").output
assert city.name in ("Oslo", "Rome")
print("Agent with OpenAIChatModel and OpenAIResponsesModel, output_type")
