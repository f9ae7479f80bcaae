"""The server accepts its own messages as history, and renders them to the text that the model had written."""

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sharp.serving.api.completion import Completion
from sharp.serving.api.errors import FieldError
from sharp.serving.api.events import Delta, Finished, FinishReason, Timing, Usage
from sharp.serving.frontends.http.chat_request import ChatRequest
from sharp.serving.frontends.http.messages_request import MessagesRequest
from sharp.serving.frontends.http.messages_response import MessagesResponse
from sharp.serving.frontends.http.openai_response import ChatResponse, Extras
from sharp.serving.frontends.http.responses_request import ResponsesRequest
from sharp.serving.frontends.http.responses_response import ResponsesResponse
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.text.chat_forms import ChatForms, MessageParser
from sharp.serving.text.chat_template import ChatTemplate
from sharp.serving.text.reasoning import FORMS, ReasoningParser
from sharp.serving.text.tool_calls import ToolCallParser
from sharp.serving.text.tool_parsers import Llama3Parser, MistralParser
from tests.serving.text.test_chat_forms import DAMAGE

THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
START = "{% for m in messages %}<{{ m.role }}>" + THOUGHT
END = "{% endfor %}<end>{% endfor %}{{ tools }}"
CALLS = "{% for c in m.tool_calls or [] %}"
# For each form: a model's text of a call, and the template that writes calls after a message's text.
FORMED = {
    ToolCallParser: (
        '\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>',
        "{{ m.content }}"
        + CALLS
        + "{{ '\\n' }}"
        + '<tool_call>\n{"name": {{ c.function.name | tojson }}, "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>",
    ),
    Llama3Parser: (
        '{"name": NAME, "parameters": ARGUMENTS}',
        "{% if not m.tool_calls %}{{ m.content }}{% endif %}" + CALLS + "{{ '; ' if not loop.first }}"
        '{"name": {{ c.function.name | tojson }}, "parameters": {{ c.function.arguments | tojson }}}',
    ),
    MistralParser: (
        "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        "{{ m.content }}" + CALLS + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    ),
}
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
WORDS = st.from_regex(r"[A-Za-z0-9.,é ]{0,12}", fullmatch=True).map(str.strip)
QUESTION = "why?"
USAGE, TIMING = Usage(1, 1, 0), Timing(0.0, 0.0, 0.0)
PROTOCOLS = ("chat", "messages", "responses")


@pytest.fixture(scope="module", params=FORMED, ids=lambda kind: kind.__name__)
def formed(request):
    _, calls = FORMED[request.param]
    template = ChatTemplate(START + calls + END, {}, on_dropped="error")
    yield request.param, template
    template.close()


def emitted(protocol, kind, text, pieces, reason):
    """Return the message, turn or items that a client gets of a completion, streamed in `pieces` if given."""
    parser = partial(lambda: MessageParser(kind(), ReasoningParser(FORMS["qwen3"])))
    make = {
        "chat": lambda: ChatResponse("1", "m", TokenTexts(None), Extras(), parser),
        "messages": lambda: MessagesResponse("1", "m", TokenTexts(None), parser, 1),
        "responses": lambda: ResponsesResponse("1", "m", TokenTexts(None), parser, 1, {}),
    }[protocol]
    response = make()
    if not pieces:
        body = response.whole([Completion(text, (), reason, None, USAGE, TIMING, None)])
        return {
            "chat": lambda: body["choices"][0]["message"],
            "messages": lambda: {"role": body["role"], "content": body["content"]},
            "responses": lambda: body["output"],
        }[protocol]()
    events = response.start(0, 0, None)
    for piece in pieces:
        events += response.delta(0, Delta("1", piece, ()))
    events += response.finished(0, Finished("1", reason, None, USAGE, TIMING, None))
    return {"chat": chat_of, "messages": turn_of, "responses": lambda events: events[-1]["response"]["output"]}[
        protocol
    ](json.loads(json.dumps(events)))


def chat_of(chunks):
    message = {}
    for chunk in chunks:
        for name, value in chunk["choices"][0]["delta"].items():
            if name == "tool_calls":
                message.setdefault(name, []).extend(value)
            else:
                message[name] = value if name == "role" else message.get(name, "") + value
    return message


def turn_of(events):
    """Join the blocks of a stream to a turn, as Anthropic's documentation says."""
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            (name,) = event["delta"].keys() - {"type"}
            blocks[-1][name] = blocks[-1].get(name, "") + event["delta"][name]
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return {"role": "assistant", "content": blocks}


def request_of(protocol, history):
    question = {"role": "user", "content": QUESTION}
    if protocol == "chat":
        return ChatRequest.model_validate({"messages": [question, history, question]})
    if protocol == "messages":
        body = {"messages": [question, history, question], "max_tokens": 1}
        return MessagesRequest.model_validate(body).generation()
    body = {"input": [question, *history, question]}
    return ResponsesRequest.model_validate(body).generation()


def rendered(protocol, history, template):
    request = request_of(protocol, history)
    request.written_in(ChatForms())
    return request.rendered(template)


def pieces_of(text, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)] if places else []


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(data=st.data())
def test_what_was_sent_renders_what_the_model_wrote(formed, protocol, data):
    kind, template = formed
    thought, words = data.draw(WORDS), data.draw(WORDS)
    calls = data.draw(st.lists(st.tuples(NAMES, st.dictionaries(TEXT, VALUES, max_size=2)), max_size=2))
    if kind is Llama3Parser and calls:
        words = ""
    form, separator = FORMED[kind][0], "; " if kind is Llama3Parser else ""
    text = (f"<think>{thought}</think>" if thought else "") + words
    text += separator.join(
        form.replace("NAME", name if kind is MistralParser else json.dumps(name)).replace(
            "ARGUMENTS", json.dumps(arguments, ensure_ascii=False)
        )
        for name, arguments in calls
    )
    history = emitted(protocol, kind, text, pieces_of(text, data), FinishReason.STOP)
    if text:
        expected = f"<user>{QUESTION}<end><assistant>{text}<end><user>{QUESTION}<end>None"
        assert rendered(protocol, history, template) == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@given(data=st.data())
def test_whatever_was_sent_is_accepted(formed, protocol, reason, data):
    kind, template = formed
    part = st.sampled_from(
        [*DAMAGE, "<think>", "</think>", "<tool_call>", "[TOOL_CALLS]f", '{"name": "f", "arguments": ', "x"]
    )
    text = "".join(data.draw(st.lists(part, max_size=8)))
    history = emitted(protocol, kind, text, pieces_of(text, data), reason)
    rendered(protocol, history, template)


REFUSED = "I cannot."


@pytest.mark.parametrize(
    ("protocol", "history"),
    [
        ("chat", {"role": "assistant", "content": [{"type": "refusal", "refusal": REFUSED}]}),
        ("chat", {"role": "assistant", "content": None, "refusal": REFUSED}),
        ("chat", {"role": "assistant", "content": [{"type": "output_text", "text": REFUSED, "annotations": []}]}),
        ("responses", [{"role": "assistant", "content": [{"type": "refusal", "refusal": REFUSED}]}]),
        ("responses", [{"role": "assistant", "content": [{"type": "input_text", "text": REFUSED}]}]),
        ("messages", {"role": "assistant", "content": [{"type": "text", "text": REFUSED, "citations": None}]}),
    ],
)
def test_refusals_and_parts_of_other_apis_are_read(formed, protocol, history):
    expected = f"<user>{QUESTION}<end><assistant>{REFUSED}<end><user>{QUESTION}<end>None"
    assert rendered(protocol, history, formed[1]) == expected


@pytest.mark.parametrize(
    "part", [{"type": "refusal", "text": "a"}, {"type": "text"}, {"type": "image_url", "image_url": {"url": "a"}}, {}]
)
def test_a_part_without_text_is_refused(part):
    with pytest.raises(ValidationError, match="only text parts are supported"):
        request_of("chat", {"role": "user", "content": [part]})
    with pytest.raises(FieldError, match="only text is supported"):
        request_of("responses", [{"role": "user", "content": [part]}])
