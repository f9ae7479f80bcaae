"""llama-index: FunctionAgent with a tool and a Context, streamed and whole."""

import asyncio
import sys

from agent_task import QUESTIONS, SYSTEM, check, weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike

BASE, MODEL, _ = sys.argv[1:]
llm = OpenAILike(
    model=MODEL,
    api_base=f"{BASE}/v1",
    api_key="-",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
    temperature=0,
    max_tokens=48,
    max_retries=0,
)


async def converse(streaming: bool) -> None:
    """Run three turns."""
    agent = FunctionAgent(
        llm=llm,
        tools=[weather],
        system_prompt=SYSTEM,
        initial_tool_choice="required",
        allow_parallel_tool_calls=False,
        streaming=streaming,
    )
    context = Context(agent)
    for question in QUESTIONS:
        result = await agent.run(question, ctx=context)
    check(len(QUESTIONS), result.response.content or "")


for streaming in (True, False):
    asyncio.run(converse(streaming))
print("three turns with a tool: FunctionAgent, streaming and whole")
