"""langgraph: a graph of a model and its tools with a checkpointer, over chats and responses, whole and streamed."""

import sys

from agent_task import QUESTIONS, SYSTEM, check, weather
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

BASE, MODEL, _ = sys.argv[1:]
weather_tool = tool(weather, parse_docstring=True)


def graph_of(use_responses_api: bool):
    """Return a graph whose model has to call in the first step of a turn."""
    model = ChatOpenAI(
        base_url=f"{BASE}/v1",
        api_key="-",
        model=MODEL,
        temperature=0,
        max_completion_tokens=48,
        max_retries=0,
        use_responses_api=use_responses_api,
    )

    def respond(state: MessagesState) -> dict:
        choice = "required" if isinstance(state["messages"][-1], HumanMessage) else "none"
        bound = model.bind_tools([weather_tool], tool_choice=choice, parallel_tool_calls=False)
        return {"messages": [bound.invoke([SystemMessage(SYSTEM), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", respond)
    graph.add_node("tools", ToolNode([weather_tool]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=InMemorySaver())


for use_responses_api in (False, True):
    graph = graph_of(use_responses_api)
    for streamed in (False, True):
        settings = {"configurable": {"thread_id": str(streamed)}}
        for question in QUESTIONS:
            given = {"messages": [HumanMessage(question)]}
            if streamed:
                for _event in graph.stream(given, settings, stream_mode="messages"):
                    pass
            else:
                graph.invoke(given, settings)
        last = graph.get_state(settings).values["messages"][-1]
        assert isinstance(last, AIMessage)
        check(len(QUESTIONS), last.text)
print("three turns with ToolNode and InMemorySaver: invoke and stream over chats and over responses")
