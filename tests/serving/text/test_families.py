"""Chat templates in use, re-created by their rules, give the tokens of `apply_chat_template`."""

import json
from pathlib import Path

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from sharp.serving.api.errors import InputError
from sharp.serving.frontends.http.chat_request import ChatRequest
from sharp.serving.text.chat_template import ChatTemplate
from sharp.serving.text.tokenizer import Tokenizer
from tests.serving.conftest import byte_tokenizer

FOLDER = Path(__file__).with_name("families")
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


def called(*arguments, content=None):
    calls = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(given)}}
        for number, given in enumerate(arguments)
    ]
    return said("assistant", content, tool_calls=calls)


def result(number, content):
    return said("tool", content, tool_call_id=f"call0000{number}")


SYSTEM, USER, ANSWER = said("system", "Be kind."), said("user", "Hello \n"), said("assistant", "Good day.")
PROPERTIES = {"city": {"type": "string", "description": "Où?"}, "days": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Says "the weather".',
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
]
OSLO, ROME = {"city": "Oslo", "days": 2}, {"city": "Róm \"a\" 'b' <c>&"}
CONVERSATIONS = {
    "a question": {"messages": [USER]},
    "a system": {"messages": [SYSTEM, USER, ANSWER, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "a call and its result": {"messages": [USER, called(OSLO), result(0, '{"sun": true}')], "tools": TOOLS},
    "text beside a call": {
        "messages": [USER, called(ROME, content="So:"), result(0, "rain"), ANSWER, USER],
        "tools": TOOLS,
    },
    "parallel calls": {"messages": [USER, called(OSLO, ROME), result(0, "sun"), result(1, "rain")], "tools": TOOLS},
    "thoughts": {"messages": [USER, said("assistant", "Yes.", reasoning_content="Hm."), USER]},
    "thoughts in the text": {"messages": [USER, said("assistant", "<think>\nHm.\n</think>\n\nYes."), USER]},
    "continuation": {
        "messages": [USER, said("assistant", "Good ")],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "empty content": {"messages": [USER, said("assistant", ""), said("user", "")]},
    "parts": {"messages": [said("user", [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])]},
    "unicode": {"messages": [said("user", "é 漢字 👩‍🚀 \u202e\x00 {{ 7 * 7 }} {% raw %} </s>"), ANSWER, USER]},
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = byte_tokenizer()
    made.add_special_tokens([AddedToken("<bos>", special=True)])
    made.save(str(path))
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL), Tokenizer(path)


def reference(tokenizer, source, body):
    """Return the ids that transformers makes, or None if the template refuses.

    transformers gets arguments as objects, as its documents say, and content as parts or as a text, whichever the
    template reads.
    """
    messages = json.loads(json.dumps(body["messages"]))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    options = {name: body[name] for name in ("tools", "continue_final_message") if name in body}
    options["add_generation_prompt"] = body.get("add_generation_prompt", True)

    def render(form):
        try:
            shown = [{**message, "content": form(message["content"])} for message in messages]
            return tokenizer.apply_chat_template(shown, chat_template=source, tokenize=False, **options)
        except (TemplateError, TypeError, AttributeError, ValueError):
            return None

    users = [word for message in messages if message["role"] == "user" for word in last_word(message)]
    found = [text for form in (lambda content: content, as_parts, as_text) if (text := render(form)) is not None]
    text = next((text for text in found if "'type': 'text'" not in text and all(user in text for user in users)), None)
    return text and (text, tokenizer(text, add_special_tokens=False)["input_ids"])


def last_word(message):
    return as_text(message["content"]).split()[-1:]


def as_parts(content):
    return [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []


def as_text(content):
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    source = (FOLDER / f"{request.param}.jinja").read_text()
    templates = [ChatTemplate(source, SPECIAL, on_dropped=policy) for policy in ("ignore", "error")]
    yield source, *templates
    for template in templates:
        template.close()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_tokens_are_those_of_transformers(family, tokenizers, name):
    source, template, strict = family
    own, (theirs, tokenizer) = ChatRequest.model_validate(CONVERSATIONS[name]), tokenizers
    expected = reference(theirs, source, CONVERSATIONS[name])
    try:
        text = own.rendered(template)
    except InputError as error:
        knows = "tools" in source or "tools" not in CONVERSATIONS[name]
        assert expected is None or (not knows and "knows none" in str(error))
        return
    if expected is not None:
        assert (text, tokenizer.encode(text, special_tokens=False)) == expected
    if expected is None or missing(text, CONVERSATIONS[name]["messages"]):
        with pytest.raises(InputError, match="the model's chat template leaves out the"):
            own.rendered(strict)
    else:
        assert own.rendered(strict) == text


def missing(text, messages):
    """Whether a text lacks the content of a message: its last word, or a city in a call."""
    words = []
    for message in messages:
        if calls := message.get("tool_calls"):
            words += [json.loads(call["function"]["arguments"])["city"].split()[0] for call in calls]
        else:
            words += last_word(message)
    return not all(word in text for word in words)
