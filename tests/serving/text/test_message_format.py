"""Conversations are rendered as transformers' `apply_chat_template` renders them, in the form that templates read."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from sharp.serving.api.errors import FieldError
from sharp.serving.text.chat_template import ChatTemplate

ROLES = "{% for m in messages %}<{{ m.role }}>"
TEXTS = ROLES + "{{ m.content | trim }}{% endfor %}"
PARTS = (
    ROLES
    + "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text | trim }}{% endfor %}{% endfor %}"
)
BOTH = (
    ROLES + "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }},{% endfor %}{% endif %}{% endfor %}"
)
# As in Llama 3.2's template, the system's content must be a text, and the user's may be parts.
MIXED = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content | trim }};"
    "{% set messages = messages[1:] %}{% endif %}" + BOTH
)
CALLS = (
    ROLES + "{% if m.content is not none %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
)
NONE_IS_A_CALL = (
    ROLES + "{% if m.content is none %}{% for c in m.tool_calls %}[{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ITEMS = (
    ROLES + "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for name, value in c.function.arguments.items() %}({{ name }}={{ value }}){% endfor %}{% endfor %}{% endfor %}"
)
ADDED = CALLS.replace("{{ m.content }}", "{{ m.content + '' }}")
HELLO = {"role": "user", "content": "hello"}


def part(*texts):
    return [{"type": "text", "text": text} for text in texts]


def call(arguments, content=None):
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


@pytest.fixture(scope="module")
def reference():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))

    def render(source, messages):
        return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)

    return render


@pytest.mark.parametrize(
    ("source", "sent", "read"),
    [
        (TEXTS, [HELLO], None),
        (TEXTS, [{"role": "user", "content": part("hel", "lo")}], [HELLO]),
        (PARTS, [{"role": "user", "content": part("hel", "lo")}], None),
        (PARTS, [HELLO], [{"role": "user", "content": part("hello")}]),
        (BOTH, [HELLO], None),
        (BOTH, [{"role": "user", "content": part("hel", "lo")}], None),
        (
            MIXED,
            [{"role": "system", "content": part("be ", "kind")}, HELLO],
            [{"role": "system", "content": "be kind"}, HELLO],
        ),
        (MIXED, [{"role": "user", "content": part("hello")}], None),
        (CALLS, [HELLO, call({"a": 1})], None),
        (CALLS, [HELLO, call({"a": 1}, "so")], None),
        (CALLS, [HELLO, call('{"a": ')], None),
        (ITEMS, [HELLO, call({"a": 1})], None),
        (ADDED, [HELLO, call({"a": 1})], [HELLO, call({"a": 1}, "")]),
        (ITEMS, [HELLO, call('{"a": ')], [HELLO, call({"arguments": '{"a": '}, "")]),
        (TEXTS, [{"role": "developer", "content": "x"}, HELLO], [{"role": "system", "content": "x"}, HELLO]),
        (TEXTS + "{# developer #}", [{"role": "developer", "content": "x"}, HELLO], None),
        (
            ROLES + "{{ m.thinking }}{{ m.content }}{% endfor %}",
            [HELLO, {"role": "assistant", "content": "x", "reasoning_content": "hm"}],
            [{**HELLO, "thinking": ""}, {"role": "assistant", "content": "x", "thinking": "hm"}],
        ),
    ],
)
def test_messages_are_read_as_a_template_reads_them(reference, source, sent, read):
    template = ChatTemplate(source, {}, on_dropped="error")
    assert template.render(sent) == reference(source, read or sent)
    template.close()


def test_calls_are_shown_where_a_template_tells_them_by_a_content_of_none():
    """Calls are shown by templates that recognise a call by a content of None, as DeepSeek's does.

    transformers removes such a content, and the calls are lost.
    """
    template = ChatTemplate(NONE_IS_A_CALL, {}, on_dropped="error")
    for content in (None, ""):
        assert template.render([HELLO, call({"a": 1}, content)]) == '<user>hello<assistant>[{"a": 1}]'


SYSTEM_DROPPED = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
CALLS_DROPPED = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEXT_BESIDE_CALLS_DROPPED = (
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
THOUGHT_DROPPED = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (
            SYSTEM_DROPPED,
            [{"role": "system", "content": "hello"}, HELLO],
            "the text of a message of the role 'system', number 1",
        ),
        (CALLS_DROPPED, [HELLO, call({"a": 1}, "b")], "the calls of a message of the role 'assistant', number 2"),
        ("{{ messages[-1].content }}", [HELLO, HELLO], "the text of a message of the role 'user', number 1"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_an_error_that_names_it(source, messages, message, caplog):
    template = ChatTemplate(source, {}, on_dropped="error")
    for _ in range(2):  # the second time, the finding is cached
        with pytest.raises(
            FieldError, match=f"the model's chat template leaves out {message}; send it in another role, or"
        ):
            template.render(messages)
    for policy, lines in (("warn", 1), ("ignore", 0)):
        caplog.clear()
        template = ChatTemplate(source, {}, on_dropped=policy)
        assert template.render(messages) == template.render(messages)
        assert len([record for record in caplog.records if "leaves out" in record.message]) == lines


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (SYSTEM_DROPPED, [{"role": "system", "content": " "}, HELLO]),
        (TEXT_BESIDE_CALLS_DROPPED, [HELLO, call({"a": 1}, "so")]),
        (THOUGHT_DROPPED, [{"role": "assistant", "content": "<think>a</think>"}, HELLO]),
    ],
)
def test_what_families_leave_out_on_purpose_is_none(source, messages):
    ChatTemplate(source, {}, on_dropped="error").render(messages)
