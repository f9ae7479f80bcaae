"""pydantic-ai: an agent with a tool, over chats and over responses, whole and streamed."""

import asyncio
import sys

from agent_task import QUESTIONS, SYSTEM, check, weather
from pydantic_ai import Agent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE, MODEL, _ = sys.argv[1:]


class CallFirst(AbstractCapability):
    """Requires a call in the first step of a turn."""

    def get_model_settings(self):
        """Return settings by the last message."""

        def settings(context):
            returned = any(isinstance(part, ToolReturnPart) for part in context.messages[-1].parts)
            return {"tool_choice": "none" if returned else "required"}

        return settings


async def converse(kind: type, streamed: bool) -> None:
    """Run three turns."""
    model = kind(MODEL, provider=OpenAIProvider(base_url=f"{BASE}/v1", api_key="-"))
    settings = {"temperature": 0, "max_tokens": 48, "parallel_tool_calls": False}
    agent = Agent(model, instructions=SYSTEM, tools=[weather], model_settings=settings, capabilities=[CallFirst()])
    history: list = []
    for question in QUESTIONS:
        if streamed:
            async with agent.run_stream(question, message_history=history) as result:
                text = await result.get_output()
        else:
            result = await agent.run(question, message_history=history)
            text = result.output
        history = result.all_messages()
    check(len(QUESTIONS), text)


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    for streamed in (False, True):
        asyncio.run(converse(kind, streamed))
print("three turns with a tool: run and run_stream with OpenAIChatModel and OpenAIResponsesModel")
