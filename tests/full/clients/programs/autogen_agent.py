"""autogen: an AssistantAgent with a tool, whole and streamed."""

import asyncio
import sys

from agent_task import QUESTIONS, SYSTEM, check, weather
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import FunctionExecutionResultMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

BASE, MODEL, _ = sys.argv[1:]
INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "multiple_system_messages": True,
    "family": "unknown",
}


class Requiring(OpenAIChatCompletionClient):
    """A client that requires a call in the first step of a turn, which the agent itself never does."""

    async def create(self, messages, *, tools=(), tool_choice="auto", **others):
        """Create a completion."""
        choice = choice_after(messages) if tools else tool_choice
        return await super().create(messages, tools=tools, tool_choice=choice, **others)

    async def create_stream(self, messages, *, tools=(), tool_choice="auto", **others):
        """Stream a completion."""
        choice = choice_after(messages) if tools else tool_choice
        async for piece in super().create_stream(messages, tools=tools, tool_choice=choice, **others):
            yield piece


def choice_after(messages) -> str:
    """Return the choice of tools after these messages."""
    return "none" if isinstance(messages[-1], FunctionExecutionResultMessage) else "required"


async def converse(streamed: bool) -> None:
    """Run three turns."""
    client = Requiring(
        model=MODEL,
        base_url=f"{BASE}/v1",
        api_key="-",
        model_info=INFO,
        temperature=0,
        max_tokens=48,
        parallel_tool_calls=False,
        max_retries=0,
    )
    agent = AssistantAgent(
        "weatherman",
        client,
        tools=[weather],
        system_message=SYSTEM,
        max_tool_iterations=3,
        reflect_on_tool_use=True,
        model_client_stream=streamed,
    )
    for question in QUESTIONS:
        result = await agent.run(task=question)
    await client.close()
    check(len(QUESTIONS), result.messages[-1].content)


for streamed in (False, True):
    asyncio.run(converse(streamed))
print("three turns with a tool: AssistantAgent, whole and with model_client_stream")
