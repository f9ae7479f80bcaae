"""crewai: an agent with a tool and a crew of three tasks, each of which has the results of those before."""

import os
import sys

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from agent_task import QUESTIONS, SYSTEM, check, weather
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

BASE, MODEL, _ = sys.argv[1:]
llm = LLM(
    model=MODEL, provider="openai", base_url=f"{BASE}/v1", api_key="-", temperature=0, max_tokens=48, max_retries=0
)
prepare = llm._prepare_completion_params


def requiring(messages, tools=None):
    """Return the parameters of a request; the library itself never requires a call."""
    params = prepare(messages, tools)
    if tools:
        params["tool_choice"] = "none" if messages[-1]["role"] == "tool" else "required"
    return params


object.__setattr__(llm, "_prepare_completion_params", requiring)
agent = Agent(
    role="Weatherman", goal=SYSTEM, backstory="A weatherman.", llm=llm, tools=[tool("weather")(weather)], max_iter=4
)
tasks: list[Task] = []
for question in QUESTIONS:
    tasks.append(Task(description=question, expected_output="A few words.", agent=agent, context=list(tasks)))
output = Crew(agents=[agent], tasks=tasks).kickoff()
check(len(QUESTIONS), output.raw)
print("three tasks of a crew, each with a tool")
