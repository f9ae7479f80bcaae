"""openai-agents: an agent with a tool, over chats and over responses, whole and streamed."""

import asyncio
import sys

from agent_task import QUESTIONS, SYSTEM, check, weather
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

BASE, MODEL, _ = sys.argv[1:]
set_tracing_disabled(True)


async def converse(kind: type, streamed: bool) -> None:
    """Run three turns."""
    client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="-", max_retries=0)
    agent = Agent(
        name="weather",
        instructions=SYSTEM,
        model=kind(model=MODEL, openai_client=client),
        tools=[function_tool(weather)],
        # the library requires a call in the first step of a turn only
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=48, include_usage=True
        ),
    )
    history: list = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        if streamed:
            result = Runner.run_streamed(agent, history)
            async for _event in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, history)
        history = result.to_input_list()
    check(len(QUESTIONS), result.final_output)
    assert result.context_wrapper.usage.output_tokens > 0


for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    for streamed in (False, True):
        asyncio.run(converse(kind, streamed))
print("three turns with a tool: Runner.run and run_streamed over chats and over responses")
