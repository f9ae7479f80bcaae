"""Tool calls: the `openai` package, unchanged, against the server."""

import json
from types import SimpleNamespace

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from sharp.core.manifest import read_manifest
from sharp.serving.api.errors import FieldError
from sharp.serving.api_config import ApiConfig
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.frontends.http.chat_request import ChatRequest
from sharp.serving.frontends.unknown_fields import UnknownFields
from sharp.serving.text.chat_forms import chat_forms
from sharp.serving.text.chat_template import ChatTemplate, load_chat_template
from sharp.serving.text.tokenizer import Tokenizer
from sharp.serving.text.tool_calls import ToolCallParser
from tests.serving.conftest import EOS, VOCAB, byte_tokenizer, write_folder
from tests.serving.frontends.http.test_openai import TEMPLATE

# The counting model continues from the last text of the conversation.
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}"
    "{{ message.role[0] }}{{ message.content }}{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITY = {**CITY, "additionalProperties": False}


def tool(name, parameters=None):
    function = {"name": name, "description": "says the weather", "parameters": parameters or CITY}
    return {"type": "function", "function": function}


def strict(parameters, name="other"):
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


STRICT = strict(CITY, "s")
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
    ) as stream:  # the package joins the deltas
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "w"


def test_a_strict_function_is_kept_to_where_calls_are_required(client):
    for choice in ("required", {"type": "function", "function": {"name": "s"}}):
        (call,) = (
            chat(client, tools=[STRICT], tool_choice=choice, parallel_tool_calls=False).choices[0].message.tool_calls
        )
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    for choice in ("none", "auto"):
        response = chat(client, tools=[STRICT], tool_choice=choice, max_completion_tokens=3)
        assert response.choices[0].message.content == "bcd"


LOOSE = {"type": "function", "function": {"name": "loose", "parameters": CITY}}


@pytest.fixture(scope="module", params=[(), ("<tool_call>", "</tool_call>", "<think>")], ids=["text", "tokens"])
def refused_at(request, counting, tmp_path_factory):
    """Return `refused_at(text, **fields)`, which gives the longest prefix of a text that a request's guide allows.

    The result is None if the guide allows the whole text. The vocabulary has bytes only, or also a token for each mark.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in request.param])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    size = VOCAB + len(request.param)
    compiler = GuideCompiler(read_manifest(counting).model_copy(update={"vocab_size": size}), Tokenizer(path))

    def refused(text, **fields):
        body = {"model": "m", "messages": [], "tools": [STRICT, LOOSE], **fields}
        guide = compiler.compile(ChatRequest.model_validate(body).guide())
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for place, token in enumerate(ids):
            if not guide.allowed(size)[token]:
                return tokenizer.decode(ids[:place])
            guide.accept(token)
        return None if guide.allowed(size)[EOS] or guide.accept(EOS) else text

    return refused


def test_a_function_without_parameters_takes_none(refused_at):
    described = {"type": "object", "properties": {}, "required": [], "title": "Nothing"}
    for parameters in (None, {}, {"type": "object", "properties": {}}, described):
        function = {"name": "now", "description": "the time"}
        function |= {} if parameters is None else {"parameters": parameters}
        for more in ({"tool_choice": "required"}, {"tools": [STRICT, {"type": "function", "function": function}]}):
            fields = {"tools": [{"type": "function", "function": function}], **more}
            assert refused_at(call_text("now", {}), **fields) is None
            assert refused_at(call_text("now", {"a": 1}), **fields).endswith('"arguments": {')
    fields = {"tools": [tool("any", {"type": "object"})], "tool_choice": "required"}
    assert refused_at(call_text("any", {"a": 1}), **fields) is None


def test_a_required_call_has_only_the_arguments_that_its_schema_names(refused_at):
    place = {"type": "object", "properties": {"city": {"type": "string"}}}
    parameters = {"type": "object", "properties": {"place": place, "all": {"type": "array", "items": place}}}

    def refused(arguments, schema=parameters):
        found = refused_at(call_text("f", arguments), tools=[tool("f", schema)], tool_choice="required")
        return found if found is None else found.partition('"arguments": ')[2]

    assert refused({"place": {"city": "Oslo"}, "all": [{"city": "Rome"}]}) is None
    assert refused({"place": {"city": "Oslo"}, "a": 1}) == '{"place": {"city": "Oslo"}, "a'
    assert refused({"place": {"town": "Oslo"}}) == '{"place": {"'
    assert refused({"all": [{"town": "Oslo"}]}) == '{"all": [{"'
    assert refused({"place": {}, "b": 1}, {**parameters, "additionalProperties": True}) is None
    combined = {"allOf": [{"properties": {"a": {"const": 1}}}], "properties": {"b": {"const": 2}}}
    assert refused({"a": 1, "b": 2}, combined) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}),
        ("guided_json", json.dumps(CITY)),
        ("structured_outputs", {"json": CITY}),
        ("guided", {"json": CITY}),
    ],
)
def test_with_a_format_the_schema_binds_the_text_and_tools_bind_calls(refused_at, field, value):
    fields = {field: value}
    good = call_text("s", {"city": "Oslo"})
    for text in ('{"city":"Rome"}', good, f"{good}\n{good}"):
        assert refused_at(text, **fields) is None
    assert refused_at('{"city":"Paris"}', **fields) == '{"city":"'
    assert refused_at("In Rome", **fields) == ""
    assert refused_at(call_text("loose", {"city": "Paris"}), **fields).endswith('"city": "')
    assert refused_at(good + '{"city":"Rome"}', **fields) == good
    assert refused_at(f"{good}\n{good}", parallel_tool_calls=False, **fields) == good
    assert refused_at('{"city":"Rome"}', tool_choice="required", **fields) == ""
    assert refused_at(good, tool_choice="none", **fields) == ""
    assert refused_at('{"a":[1]}', response_format={"type": "json_object"}) is None


def test_where_a_model_may_choose_calls_of_strict_functions_obey_their_schemas(refused_at):
    good = call_text("s", {"city": "Oslo"})
    words = '<think>Let me see: 1 < 2, <tool_bar>, </tool_call> and "é"<think>\n'
    for text in ("", words, good, f"{words}{good}\n{good} so far", f"{good}{good}"):
        assert refused_at(text) is None
    assert refused_at(words + call_text("s", {"city": "Paris"})).endswith('"arguments": {"city": "')
    assert refused_at(words + call_text("s", {})).endswith('"arguments": {')
    assert refused_at(good + call_text("other", {})) == good + '<tool_call>\n{"name": "'
    assert refused_at(call_text("loose", {"a": [1, {}]})) is None
    assert refused_at("<tool_call> is how") == "<tool_call>"
    assert refused_at(good + "\n", parallel_tool_calls=False) == good
    assert refused_at(words + good, parallel_tool_calls=False) is None


def test_a_required_call_is_written_as_the_model_writes_calls(refused_at):
    good = call_text("s", {"city": "Oslo"})
    assert refused_at(f"{good}\n{good}", tool_choice="required") is None
    assert refused_at("a" + good, tool_choice="required") == ""


def test_nothing_is_constrained_unless_a_function_is_strict():
    assert ChatRequest.model_validate({"model": "m", "messages": [], "tools": [LOOSE]}).guide() is None


def test_auto_gives_words_or_calls(client):
    response = chat(client, tool_choice="auto", max_completion_tokens=3)
    assert (response.choices[0].message.content, response.choices[0].message.tool_calls) == ("bcd", None)
    assert response.usage.prompt_tokens == len("wtime" + "ua")  # the template got the tools
    assert chat(client, tool_choice="none", max_completion_tokens=3).usage.prompt_tokens == len("ua")


def test_results_of_tools_come_back_as_messages(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "k"},
    ]
    response = chat(client, messages, max_completion_tokens=3)
    assert response.choices[0].message.content == "lmn"
    written = '<tool_call>{"name": "w", "arguments": {"city": "Oslo"}}</tool_call>'
    assert response.usage.prompt_tokens == len("wtime" + "ua" + written + "a" + "tk")
    for nothing in ("", None, {}):
        call["function"]["arguments"] = nothing
        empty = chat(client, messages, max_completion_tokens=3).usage.prompt_tokens
        assert empty == len("wtime" + "ua" + '<tool_call>{"name": "w", "arguments": {}}</tool_call>' + "a" + "tk")
    call["function"]["arguments"] = {"city": "Oslo"}  # an object, which vLLM also accepts
    assert chat(client, messages, max_completion_tokens=3).usage.prompt_tokens == response.usage.prompt_tokens
    call["function"]["arguments"] = 7
    with pytest.raises(openai.BadRequestError, match=r"arguments cannot be used: .* a text of JSON, or an object"):
        chat(client, messages)
    # A model may write anything, and a client sends it back. Arguments that are no object reach the template as a text.
    for arguments, text in (
        ('{"city": "Os', '"{\\"city\\": \\"Os"'),
        ('{"a": NaN}', '"{\\"a\\": NaN}"'),
        ('"Oslo"', '"Oslo"'),
    ):
        call["function"]["arguments"] = arguments
        written = '<tool_call>{"name": "w", "arguments": ' + text + "}</tool_call>"
        sent = chat(client, messages, max_completion_tokens=3).usage.prompt_tokens
        assert sent == len("wtime" + "ua" + written + "a" + "tk")


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
        (
            {"extra_body": {"guided_regex": "a"}},
            "tools",
            "tools and guided_regex are both set; that needs a JSON schema, or tool_choice none",
        ),
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
        (
            {"tools": [STRICT, strict({"type": "nonsense"})]},
            "tools",
            "tools cannot be strict: guided.grammar cannot be used",
        ),
        ({"tools": [strict({"description": "x" * 70000})]}, "tools", "tools are too long to be strict"),
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
        {"name": "tool_use", "template": '{{ tools[0].name }}<tool_call>{"name": '},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = load_chat_template(tmp_path)
    assert (template.render([]), template.render([], [{"name": "w"}])) == ("plain", 'w<tool_call>{"name": ')
    with pytest.raises(FieldError, match="knows none"):
        ChatTemplate("{{ messages }}", {}).render([], [{"name": "w"}])


QWEN = """{% if tools %}within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"""
QWEN_CODER = """{% if tools %}<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
</function>
</tool_call>{% endif %}{% for message in messages %}{% for call in message.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
</function>
</tool_call>{% endfor %}{% endfor %}"""
GLM = """{% if tools %}<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{% endif %}{% for message in messages %}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
</tool_call>{% endfor %}{% endfor %}"""
UNTOLD = """{{ tools }}{% for message in messages %}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}{% endfor %}"""
UNKNOWING = """{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}""" + QWEN


@pytest.mark.parametrize("source", ["{{ tools }}[TOOL_CALLS]", QWEN_CODER, GLM], ids=["mistral", "qwen-coder", "glm"])
def test_calls_in_a_form_that_is_not_read_are_refused(source):
    template = ChatTemplate(source, {})
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": TOOLS})
    request.written_in(chat_forms(template, ApiConfig()))
    with pytest.raises(FieldError, match="the model writes calls in another form than those of Hermes") as caught:
        request.prompts(SimpleNamespace(template=template, fields=UnknownFields("warn")))
    assert caught.value.field == "tools"


@pytest.mark.parametrize("source", [QWEN, UNTOLD, UNKNOWING], ids=["told", "untold", "without calls of its own"])
def test_calls_as_json_are_read(source):
    assert chat_forms(ChatTemplate(source, {}), ApiConfig()).tools is ToolCallParser


def call_text(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


COMPLETIONS = [
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
    (
        call_text("f", {"a": 'x</tool_call>"\\</tool_call>'}) + call_text("g", {}),
        "",
        [("f", json.dumps({"a": 'x</tool_call>"\\</tool_call>'})), ("g", "{}")],
    ),
    (
        '<tool_call>{"name": "f</tool_call> no' + call_text("g", {}),
        '<tool_call>{"name": "f</tool_call> no',
        [("g", "{}")],
    ),
    ('<tool_call>{"name": "f</tool_call> no', '<tool_call>{"name": "f</tool_call> no', []),
    ('<tool_call>{"name": "\\u12</tool_call> no', '<tool_call>{"name": "\\u12</tool_call> no', []),
]


@pytest.mark.parametrize(("text", "shown", "calls"), COMPLETIONS, ids=range(len(COMPLETIONS)))
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
