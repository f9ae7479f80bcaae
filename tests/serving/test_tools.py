"""Calls of functions: the `openai` package, unchanged, against the server."""

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharp.serving.chat_template import ChatTemplate, load_chat_template
from sharp.serving.errors import FieldError
from sharp.serving.tool_calls import ToolCallParser
from tests.serving.conftest import write_folder
from tests.serving.test_openai import TEMPLATE

# The counting model goes on from the last text of the conversation.
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}:{{ call.function.arguments.city }}</tool_call>"
    "{% endfor %}"
    "{{ message.role[0] }}{{ message.content }}{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITY = {**CITY, "additionalProperties": False}


def tool(name, parameters=None):
    function = {"name": name, "description": "says the weather", "parameters": parameters or CITY}
    return {"type": "function", "function": function}


STRICT = {"type": "function", "function": {"name": "s", "parameters": CITY, "strict": True}}
TOOLS = [tool("w"), tool("time", {"type": "object", "additionalProperties": False})]


@pytest.fixture(scope="module")
def client(start_server, tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "calling", hashing=0)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    address = start_server(folder).http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, messages=None, **fields):
    messages = messages or [{"role": "user", "content": "a"}]
    fields = {"temperature": 0, "tools": TOOLS, **fields}
    return client.chat.completions.create(model="calling", messages=messages, **fields)


def test_a_required_call_obeys_the_schema(client):
    (choice,) = chat(client, tool_choice="required", parallel_tool_calls=False).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.type, call.id[:5]) == (
        "tool_calls",
        None,
        "function",
        "call_",
    )
    assert call.function.name in ("w", "time")
    named = chat(client, tool_choice={"type": "function", "function": {"name": "w"}}, n=2, temperature=2, seed=1)
    for choice in named.choices:
        assert choice.message.tool_calls[0].function.name == "w"
        assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")
    ids = {choice.message.tool_calls[0].id for choice in named.choices}
    assert len(ids) == 2


def test_a_streamed_call(client):
    choice = {"type": "function", "function": {"name": "w"}}
    chunks = [chunk.choices[0] for chunk in chat(client, tool_choice=choice, stream=True)]
    assert chunks[0].delta.role == "assistant"
    (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (call.index, call.type, call.function.name) == (0, "function", "w")
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    with client.chat.completions.stream(
        model="calling",
        messages=[{"role": "user", "content": "a"}],
        tools=TOOLS,
        tool_choice=choice,
        temperature=0,
    ) as stream:  # the package's own accumulation of deltas
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "w"


def test_a_strict_function_is_kept_to_where_calls_are_required(client):
    for choice in ("required", {"type": "function", "function": {"name": "s"}}):
        (call,) = (
            chat(client, tools=[STRICT], tool_choice=choice, parallel_tool_calls=False).choices[0].message.tool_calls
        )
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    for choice in ("none", "auto"):
        assert (
            chat(client, tools=[STRICT], tool_choice=choice, max_completion_tokens=3).choices[0].message.content
            == "bcd"
        )


def test_auto_answers_in_words_or_calls(client):
    answer = chat(client, tool_choice="auto", max_completion_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("bcd", None)
    assert answer.usage.prompt_tokens == len("wtime" + "ua")  # the template was given the tools
    assert chat(client, tool_choice="none", max_completion_tokens=3).usage.prompt_tokens == len("ua")


def test_results_of_tools_come_back_as_messages(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "k"},
    ]
    answer = chat(client, messages, max_completion_tokens=3)
    assert answer.choices[0].message.content == "lmn"
    assert answer.usage.prompt_tokens == len("wtime" + "ua" + "<tool_call>w:Oslo</tool_call>a" + "tk")
    for arguments in ("{", "[" * 100_000):
        call["function"]["arguments"] = arguments
        with pytest.raises(openai.BadRequestError, match="messages has a call of 'w' whose arguments are no JSON"):
            chat(client, messages)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tool_choice is the function 'x'; tools has no such",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools is empty; give at least one tool"),
        ({"tool_choice": "sometimes"}, "tool_choice", "tool_choice"),
        ({"tools": [tool("w"), tool("w")]}, "tools", "tools has two functions of the same name"),
        ({"tools": [tool("a b")]}, "tools", "tools.0.function.name cannot be used"),
        ({"tools": [tool("w")] * 129}, "tools", "tools has 129 entries; the limit is 128"),
        ({"response_format": {"type": "json_object"}}, "tools", "tools and a form of the answer are both set"),
        (
            {"tools": [tool("w", {"type": "nonsense"})], "tool_choice": "required"},
            "tools",
            "tools cannot be required: guided.grammar cannot be used",
        ),
        (
            {"tools": [tool("w", {"description": "x" * 70000})], "tool_choice": "required"},
            "tools",
            "tools are too long to be required",
        ),
    ],
)
def test_bad_tools_name_the_field(client, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert message in str(caught.value)
    assert caught.value.param == param


def test_a_model_that_knows_no_tools_says_so(start_server, tmp_path):
    folder = write_folder(tmp_path / "calling", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    address = start_server(folder).http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="tools is set, and the model's chat template knows none"):
            chat(client)
        assert chat(client, tool_choice="none", max_completion_tokens=2).choices[0].message.content == "bc"


def test_a_model_may_have_a_template_of_its_own_for_tools(tmp_path):
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}{# <tool_call> #}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = load_chat_template(tmp_path)
    assert (template.render([]), template.render([], [{"name": "w"}])) == ("plain", "w")
    with pytest.raises(FieldError, match="knows none"):
        ChatTemplate("{{ messages }}", {}).render([], [{"name": "w"}])


def test_calls_in_a_form_that_is_not_read_are_refused():
    template = ChatTemplate("{{ tools }}[TOOL_CALLS]", {})
    with pytest.raises(FieldError, match="tools is set, and the model writes calls in another form than <tool_call>"):
        template.render([], [{"name": "w"}])
    assert template.render([]) == "None[TOOL_CALLS]"


def call_text(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


ANSWERS = [
    ("only words < and <tool", "only words < and <tool", []),
    (call_text("f", {}), "", [("f", "{}")]),
    (
        "Let me see. \n" + call_text("f", {"é": 1}) + "\n" + call_text("g", {}),
        "Let me see.",
        [("f", '{"é": 1}'), ("g", "{}")],
    ),
    ("<tool_call>no JSON</tool_call> sorry", "<tool_call>no JSON</tool_call> sorry", []),
    ("<tool_call>[1]</tool_call>" + call_text("f", {}), "<tool_call>[1]</tool_call>", [("f", "{}")]),
    ("<tool_call>" + "[" * 100000 + "</tool_call>", "<tool_call>" + "[" * 100000 + "</tool_call>", []),
    ('x<tool_call>{"name": "f"', 'x<tool_call>{"name": "f"', []),
    (call_text("f", {}) + "\n done ", "\n done", [("f", "{}")]),
    (call_text("f", {}) + "\n\n", "", [("f", "{}")]),
]


@pytest.mark.parametrize(("text", "shown", "calls"), ANSWERS, ids=range(len(ANSWERS)))
@settings(deadline=None)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(text, shown, calls, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parser, words, found = ToolCallParser(), "", []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        more, new = parser.push(text[start:end])
        words += more
        found += new
    words += parser.end()
    assert (words, [(call.name, call.arguments) for call in found]) == (shown, calls)
    assert found == parser.calls


def test_one_call_only():
    parser = ToolCallParser(several=False)
    assert [call.name for call in parser.push(call_text("f", {}) + call_text("g", {}))[1]] == ["f"]


def test_each_schema_may_refer_to_its_own_definitions(client):
    def referring(name, definition):
        parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
        return tool(name, {**parameters, "additionalProperties": False, "$defs": {"x": definition}})

    tools = [referring("f", {"const": 12}), referring("g", {"const": "x"})]
    for name, value in (("f", 12), ("g", "x")):
        choice = {"type": "function", "function": {"name": name}}
        (call,) = chat(client, tools=tools, tool_choice=choice).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": value}
