"""semantic-kernel: a ChatCompletionAgent with a plugin and a thread, whole and streamed."""

import asyncio
import sys
from typing import Annotated

from agent_task import QUESTIONS, SYSTEM, check, weather
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function

BASE, MODEL, _ = sys.argv[1:]


class Weather:
    """The plugin."""

    @kernel_function(description="Look up the weather of a city.")
    def weather(self, city: Annotated[str, "The city, one word."]) -> str:
        """Look up the weather of a city."""
        return weather(city if city in ("Oslo", "Rome", "Lima") else "Oslo")


def required() -> KernelArguments:
    """Return settings that require a call. The library changes them after the call, so each turn has its own."""
    settings = OpenAIChatPromptExecutionSettings(
        temperature=0,
        max_tokens=80,
        parallel_tool_calls=False,
        function_choice_behavior=FunctionChoiceBehavior.Required(),
    )
    return KernelArguments(settings=settings)


async def converse(streamed: bool) -> None:
    """Run three turns."""
    client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="-", max_retries=0)
    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion(MODEL, async_client=client),
        name="weatherman",
        instructions=SYSTEM,
        plugins=[Weather()],
    )
    thread = None
    for question in QUESTIONS:
        if streamed:
            text = ""
            async for response in agent.invoke_stream(question, thread=thread, arguments=required()):
                text, thread = text + str(response.content), response.thread
        else:
            response = await agent.get_response(question, thread=thread, arguments=required())
            text, thread = str(response.content), response.thread
    check(len(QUESTIONS), text)


for streamed in (False, True):
    asyncio.run(converse(streamed))
print("three turns with a plugin: ChatCompletionAgent.get_response and invoke_stream")
