"""Tool calls and reasoning in the forms of several models are parsed, however their text is cut into pieces."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from sharp.serving.api.errors import InputError
from sharp.serving.api_config import ApiConfig
from sharp.serving.text.chat_forms import MessageParser, chat_forms
from sharp.serving.text.chat_template import ChatTemplate, load_chat_template
from sharp.serving.text.reasoning import FORMS, ReasoningParser
from sharp.serving.text.tool_calls import ToolCallParser
from sharp.serving.text.tool_parsers import Llama3Parser, MistralParser, PythonicParser, WholeHermesParser

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
OPENED = HERMES.removesuffix("\n</tool_call>")
ONE = [("f", '{"a": 1}')]
TWO = [*ONE, ("g", "{}")]
# (parser, text, whether the text was cut off, the text shown to the user, calls)
TEXTS = [
    (ToolCallParser, "so " + HERMES, False, "so", ONE),
    (ToolCallParser, 'so <tool_call>\n{"name": "f", "argu', True, "so", []),
    (ToolCallParser, "so <tool_ca", True, "so", []),
    (ToolCallParser, "1 <", True, "1 <", []),
    (ToolCallParser, HERMES + '\n<tool_call>\n{"name"', True, "", ONE),
    (ToolCallParser, OPENED, False, "", ONE),  # some models end without the closing tag
    (ToolCallParser, '<tool_call>\n{"name": "f"', False, '<tool_call>\n{"name": "f"', []),
    (Llama3Parser, '{"name": "f", "parameters": {"a": 1}}', False, "", ONE),
    (
        Llama3Parser,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g"}',
        False,
        "",
        [*ONE, ("g", "{}")],
    ),
    (Llama3Parser, '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', False, "", ONE),
    (Llama3Parser, '{"name": "Ann", "age": 7} is JSON', False, '{"name": "Ann", "age": 7} is JSON', []),
    (Llama3Parser, '{"name": "f", "parame', True, "", []),
    (Llama3Parser, '{"value": 1}', False, '{"value": 1}', []),
    (Llama3Parser, "words {", False, "words {", []),
    (PythonicParser, '[f(a=1), m.g(b="[x]", c=[1, None])]', False, "", [*ONE, ("m.g", '{"b": "[x]", "c": [1, null]}')]),
    (PythonicParser, "[f(a=1), g(", True, "", []),
    (PythonicParser, "[1, 2]", False, "[1, 2]", []),
    (PythonicParser, "[f(1)]", False, "[f(1)]", []),
    (PythonicParser, "[f(**{})]", False, "[f(**{})]", []),
    (PythonicParser, "[f(a=open('x'))]", False, "[f(a=open('x'))]", []),
    (PythonicParser, "[" * 100_000, False, "[" * 100_000, []),
    (PythonicParser, "words [f(a=1)]", False, "words [f(a=1)]", []),
    (MistralParser, 'so [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', False, "so ", ONE),
    (MistralParser, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', False, "", TWO),
    (MistralParser, '[TOOL_CALLS][{"name": "f"', True, "", []),
    (MistralParser, "[TOOL_CALLS]no", False, "[TOOL_CALLS]no", []),
    (MistralParser, "[TOOL", False, "[TOOL", []),
    (MistralParser, "so [TOOL_CALLS", True, "so ", []),
    (MistralParser, "a [", True, "a [", []),
    (ToolCallParser, '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', False, "", ONE),
    (ToolCallParser, '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}</tool_call>', False, "", TWO),
    (ToolCallParser, '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_call>', False, "", TWO),
    (ToolCallParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', False, "", ONE),
    (ToolCallParser, '<tool_call>{"name": "g", "arguments": null}</tool_call>', False, "", TWO[1:]),
    (ToolCallParser, '<tool_call>{"name": "f", "arguments": "Oslo"}</tool_call>', False, "", [("f", '"Oslo"')]),
    *(
        (ToolCallParser, text, False, text, [])
        for text in (
            '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>',  # an unknown name would lose the arguments
            '<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": 1}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',  # strict parsers refuse it
            '<tool_call>{"name": "f", "arguments": {"a": -1e400}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f"} and {"name": "g"}</tool_call>',
        )
    ),
    (WholeHermesParser, HERMES + HERMES.replace('"f"', '"g"'), False, "", [*ONE, ("g", '{"a": 1}')]),
    (WholeHermesParser, "\n" + HERMES, False, "", ONE),
    (WholeHermesParser, json.dumps({"a": HERMES}), False, json.dumps({"a": HERMES}), []),
    (WholeHermesParser, "<tool", False, "<tool", []),
    (WholeHermesParser, "<tool", True, "", []),
    (Llama3Parser, '{"name": "Ann", "age": 7}', False, '{"name": "Ann", "age": 7}', []),
    (PythonicParser, "[f(a=1, a=2)]", False, "[f(a=1, a=2)]", []),
    (PythonicParser, "[f(a=1e400)]", False, "[f(a=1e400)]", []),
    (PythonicParser, "[(lambda: 0)(a=1)]", False, "[(lambda: 0)(a=1)]", []),
    (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}] so', False, "so", ONE),
    (MistralParser, '[TOOL_CALLS]f{"a": 1} so', False, " so", ONE),
    (MistralParser, '[TOOL_CALLS]no[TOOL_CALLS]f{"a": 1}', False, "[TOOL_CALLS]no", ONE),
    (MistralParser, '[TOOL_CALLS][{"name": "f"}, {"x": 1}]', False, '[TOOL_CALLS][{"name": "f"}, {"x": 1}]', []),
]


@pytest.mark.parametrize(("kind", "text", "cut", "shown", "calls"), TEXTS, ids=range(len(TEXTS)))
@given(data=st.data())
def test_calls_are_taken_out_however_the_text_is_cut(kind, text, cut, shown, calls, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parser, words, found = MessageParser(kind()), "", []
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    for parts in [*map(parser.push, pieces), parser.end(cut=cut)]:
        words += parts.content
        found += parts.calls
    assert (words, [(call.name, call.arguments) for call in found]) == (shown, calls)
    assert parser.known == len(calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
DAMAGE = ("NaN", "1e400", *"\"'{},:[]\\\n", " so ", "</tool_call>", '"a": ', '{"name": "g"}')
FORMED = {
    ToolCallParser: ("<tool_call>\n", '{{"name": {name}, "arguments": {arguments}}}', "\n</tool_call>"),
    Llama3Parser: ("", '{{"name": {name}, "parameters": {arguments}}}', ""),
    MistralParser: ("[TOOL_CALLS]", '[{{"name": {name}, "arguments": {arguments}}}]', ""),
}


def mutated(text, data):
    """Return a text with a few random damages, like calls that a small model writes."""
    for _ in range(data.draw(st.integers(0, 3))):
        kind = data.draw(st.sampled_from(["cut", "insert", "delete", "rename"]))
        place = data.draw(st.integers(0, len(text)))
        if kind == "cut":
            text = text[:place]
        elif kind == "insert":
            text = text[:place] + data.draw(st.sampled_from(DAMAGE)) + text[place:]
        elif kind == "delete":
            text = text[:place] + text[place + 1 :]
        else:
            old, new = data.draw(st.permutations(["name", "arguments", "parameters", "args", "function", "mark0"]))[:2]
            text = text.replace(f'"{old}"', f'"{new}"', 1)
    return text


@pytest.mark.parametrize("kind", FORMED)
@given(data=st.data())
def test_a_damaged_call_loses_no_argument_and_is_never_invalid_json(kind, data):
    start, call, end = FORMED[kind]
    values = data.draw(st.lists(VALUES, min_size=1, max_size=3))
    arguments = [json.dumps({f"mark{number}": [value, f"Mark{number}"]}) for number, value in enumerate(values)]
    calls = [call.format(name=json.dumps(f"f{number}"), arguments=text) for number, text in enumerate(arguments)]
    between = data.draw(st.sampled_from([end + start, "\n", "; ", " and "]))
    text = mutated(start + between.join(calls) + end, data)
    parser = MessageParser(kind())
    pushed, rest = parser.push(text), parser.end()
    found = [*pushed.calls, *rest.calls]
    for entry in found:
        from_json(entry.arguments, allow_inf_nan=False)  # pydantic's parser, in Rust
    known = pushed.content + rest.content + "".join(f"{entry.name} {entry.arguments}" for entry in found)
    for mark in re.findall(r"[mM]ark\d", text):
        assert text.count(mark) <= known.count(mark)


def test_one_call_at_most():
    for kind, text in ((Llama3Parser, '{"name": "f"};{"name": "g"}'), (PythonicParser, "[f(), g()]")):
        parser = MessageParser(kind(several=False))
        parser.push(text)
        assert [call.name for call in parser.end().calls] == ["f"]


THOUGHTS = [
    # (form, prompt, text, reasoning, content)
    ("qwen3", "", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
    ("qwen3", "", "\n<think>hm</think>yes", "hm", "yes"),
    ("qwen3", "", "<think>\n  indented</think>yes", "  indented", "yes"),  # streams once lost these blanks
    ("qwen3", "", "yes <think>", "", "yes <think>"),
    ("qwen3", "", "<thin", "", "<thin"),
    ("qwen3", "", "<think>\nhm", "hm", ""),
    ("qwen3", "x<think>\n", "hm</think>yes", "hm", "yes"),
    ("qwen3", "x<think>\n\n</think>\n\n", "yes</think>", "", "yes</think>"),
    ("deepseek_r1", "", "hm\n\nso</think>\nyes", "hm\n\nso", "yes"),
    ("deepseek_r1", "x<think>\n", "<think>\nhm</think>yes", "hm", "yes"),
    ("deepseek_r1", "x</think>", "yes", "", "yes"),
    ("deepseek_r1", "", "hm</thi", "hm</thi", ""),
    ("mistral", "", "[THINK]hm[/THINK]yes", "hm", "yes"),
]


@pytest.mark.parametrize(("form", "prompt", "text", "thought", "content"), THOUGHTS, ids=range(len(THOUGHTS)))
@given(data=st.data())
def test_thoughts_are_taken_out(form, prompt, text, thought, content, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parser = MessageParser(None, ReasoningParser(FORMS[form], prompt))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    parts = [*map(parser.push, pieces), parser.end(cut=True)]
    assert ("".join(part.reasoning for part in parts), "".join(part.content for part in parts)) == (thought, content)


def test_a_call_in_a_thought_is_none():
    parser = MessageParser(ToolCallParser(), ReasoningParser(FORMS["qwen3"]))
    parts = parser.push(f"<think>{HERMES}</think>{HERMES}")
    assert (parts.reasoning, parts.content, len(parts.calls)) == (HERMES, "", 1)


SAMPLE = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}{{ tools }}"


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("<tool_call>{{ c.function | tojson }}</tool_call>", ToolCallParser),
        ('{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}', Llama3Parser),
        ("[TOOL_CALLS][{{ c.function | tojson }}]", MistralParser),
        ("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}", MistralParser),
        ("[{{ c.function.name }}()]", PythonicParser),
        ("<tool_call>{{ c.function.name }}</tool_call>", None),
    ],
)
def test_the_form_is_found_out_from_the_template(call, kind):
    template = ChatTemplate(SAMPLE.replace("%s", call), {})
    assert chat_forms(template, ApiConfig()).tools is kind
    assert chat_forms(template, ApiConfig(tool_parser="pythonic")).tools is PythonicParser
    template.close()


def test_another_template_by_file_and_by_name(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("own")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    other = tmp_path / "other.jinja"
    other.write_text("other")
    config = '{"chat_template": [{"name": "default", "template": "d"}, {"name": "brief", "template": "brief"}]}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    question = [{"role": "user", "content": "a"}]
    for chosen, text in ((None, "own"), (str(other), "other"), ("rag", "rag"), ("brief", "brief")):
        assert load_chat_template(tmp_path, chosen).render(question) == text
    chatml = load_chat_template(tmp_path, "chatml").render(question)
    assert chatml == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(InputError, match="--chat-template is 'nothing', which is neither a file nor a template of"):
        load_chat_template(tmp_path, "nothing")
    other.write_text("")
    with pytest.raises(InputError, match="the one that --chat-template names is empty"):
        load_chat_template(tmp_path, str(other))
