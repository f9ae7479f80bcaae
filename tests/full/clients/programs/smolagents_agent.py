"""smolagents: ToolCallingAgent, which requires a call in each turn, and CodeAgent, which writes Python."""

import sys

from agent_task import QUESTIONS, called, check, weather
from smolagents import ActionStep, CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.utils import AgentMaxStepsError

BASE, MODEL, _ = sys.argv[1:]
model = OpenAIServerModel(
    MODEL, api_base=f"{BASE}/v1", api_key="-", temperature=0, max_tokens=100, parallel_tool_calls=False
)
for stream_outputs in (False, True):
    agent = ToolCallingAgent([tool(weather)], model, stream_outputs=stream_outputs, verbosity_level=LogLevel.OFF)
    del agent.tools["final_answer"]  # whose text a small model would not end
    for number, question in enumerate(QUESTIONS):
        agent.run(question, max_steps=1, reset=number == 0)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    # the limit of one step a turn ends each turn with AgentMaxStepsError
    errors = [step.error for step in steps if step.error and not isinstance(step.error, AgentMaxStepsError)]
    assert not errors, errors
    called.extend(call.name for step in steps for call in step.tool_calls or ())
    check(len(QUESTIONS), "")
agent = CodeAgent([], model, use_structured_outputs_internally=True, verbosity_level=LogLevel.OFF)
agent.run(QUESTIONS[0], max_steps=1)
print("three turns: ToolCallingAgent, whole and streamed, CodeAgent with structured outputs")
