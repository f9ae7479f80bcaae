"""vLLM's structured output, in the forms in which its clients write it."""

import json

import openai
import pytest

from sharp.serving.config import EngineConfig
from tests.serving.conftest import write_folder
from tests.serving.frontends.http.test_openai import TEMPLATE

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "array", "items": {"const": 3}, "minItems": 2, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LARK = 'start: "yes" | "no"'
GBNF = 'root ::= "ye" "s" | "no"'
TAG = {
    "structures": [{"begin": "bcd", "schema": {"const": 7}, "end": "x"}],
    "triggers": ["bc"],
}
NEWER_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["bc"],
        "tags": [{"begin": "bcd", "content": {"type": "json_schema", "json_schema": {"const": 7}}, "end": "x"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "structured", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def connect(started):
    return openai.OpenAI(base_url=f"http://{started.http_address}/v1", api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def client(start_server, folder):
    with connect(start_server(folder)) as client:
        yield client


@pytest.fixture(params=["completions", "chat"])
def text(request, client):
    def ask(**body):
        body = {"temperature": 3, "seed": 1, "max_tokens": 60, **body}
        if request.param == "chat":
            messages = [{"role": "user", "content": "a"}]
            chat = client.chat.completions.create(model="structured", messages=messages, extra_body=body)
            return chat.choices[0].message.content
        return client.completions.create(model="structured", prompt="a", extra_body=body).choices[0].text

    return ask


def both(name, value):
    """Return a constraint in vLLM's form and in its older form."""
    return [{"structured_outputs": {name: value}}, {f"guided_{name}": value}]


@pytest.mark.parametrize("body", [*both("json", SCHEMA), *both("json", json.dumps(SCHEMA))])
def test_json_is_compact(text, body):
    completion = text(**body)
    assert json.loads(completion)["b"] == [3, 3]
    assert completion == json.dumps(json.loads(completion), separators=(",", ":"))


def test_a_request_can_have_blanks_and_so_can_a_server(text, start_server, folder):
    completions = {
        text(structured_outputs={"json": SCHEMA, "whitespace_pattern": "[ ]{3}"}, seed=seed) for seed in range(3)
    }
    assert all("   " in completion for completion in completions)
    assert "\n" not in text(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    with connect(start_server(folder, engine=EngineConfig(json_whitespace="flexible"))) as flexible:
        body = {"guided_json": SCHEMA, "logit_bias": {"10": 100}}
        response = flexible.completions.create(model="structured", prompt="a", max_tokens=20, extra_body=body)
    assert "\n" in response.choices[0].text


@pytest.mark.parametrize("body", [*both("choice", ["é\"'|x", "no\n"]), *both("regex", "é\"'\\|x|no\n")])
def test_a_choice_and_an_expression(text, body):
    assert {text(**body, seed=seed) for seed in range(4)} == {"é\"'|x", "no\n"}


def test_json_object_that_is_false_asks_for_nothing_and_leaves_the_rest_alone(text):
    plain = text(structured_outputs={"json_object": False})
    assert plain == text()
    chosen = text(structured_outputs={"choice": ["yes"], "json_object": False})
    assert chosen == "yes"


@pytest.mark.parametrize("body", [*both("grammar", LARK), *both("grammar", GBNF)])
def test_grammars_of_lark_and_of_llama_cpp(text, body):
    assert {text(**body, seed=seed) for seed in range(5)} == {"yes", "no"}


def test_any_json_object(text):
    for body in ({"structured_outputs": {"json_object": True}}, {"guided_json_object": True}):
        assert text(**body, logit_bias={"125": 100}) == "{}"


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
        {"structural_tag": TAG},
        {"response_format": {"type": "structural_tag", **TAG}},
        {"response_format": NEWER_TAG},
    ],
)
def test_a_structural_tag_binds_what_follows_its_trigger(text, body):
    # The model counts on from "a", so it writes the trigger.
    assert text(**body, temperature=0, max_tokens=8) == "bcd7xyz{"


def test_objects_without_other_properties(text):
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    for seed in range(3):
        completion = text(structured_outputs={"json": schema, "disable_additional_properties": True}, seed=seed)
        assert completion in ("{}", '{"a":1}')


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "says nothing to match; set json, regex"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "says nothing to match; set json, regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "has json and regex; set one"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json", "guided_json and guided_regex are both set"),
        ({"guided_regex": "a", "guided": {"regex": "a"}}, "guided_regex", "guided_regex and guided are both set"),
        ({"guided_regex": "("}, "guided_regex", "guided_regex cannot be used"),
        ({"guided_choice": []}, "guided_choice", "guided_choice is []; it must have texts"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", "guided_choice cannot be used: List should have at most"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs.regex cannot be used"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs", "structured_outputs.grammar cannot"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag", "structural_tag cannot be used"),
        ({"structural_tag": "{"}, "structural_tag", "structural_tag is no JSON"),
        (
            {"structural_tag": {"structures": [{"begin": "x", "end": "y"}], "triggers": ["z"]}},
            "structural_tag",
            "structural_tag cannot be used",
        ),
        (
            {"structural_tag": {"format": {"type": "newer"}}},
            "structural_tag",
            "structural_tag cannot be used: the format 'newer' is not supported",
        ),
        (
            {"structural_tag": {"format": {"type": "triggered_tags", "stop_after_first": True}}},
            "structural_tag",
            "structural_tag cannot be used: stop_after_first is not supported",
        ),
        (
            {"structural_tag": {"structures": [{"begin": "<f>", "end": ""}] * 257, "triggers": ["<"]}},
            "structural_tag",
            "structural_tag cannot be used: it has more than 256 structures",
        ),
    ],
)
def test_what_cannot_be_is_named_as_it_came(text, body, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        text(**body)
    assert (caught.value.param, message in str(caught.value)) == (param, True), str(caught.value)
