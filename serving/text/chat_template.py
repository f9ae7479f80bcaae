"""`ChatTemplate`: a conversation as the text that a model was trained on."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.text.tool_calls import CALL_END, CALL_START, ToolCallParser

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
CALL_FORM = f'{CALL_START}{{"name": ..., "arguments": ...}}{CALL_END}'
# As the instructions of templates show the form; with other fields first it would be no JSON that is read here.
SHOWN_CALL = re.compile(CALL_START + r"""\s*\{\s*["'](name|arguments)["']""")
# A conversation with a call: what a template makes of it is what its model writes.
SAMPLE_TOOL = {
    "type": "function",
    "function": {"name": "sample", "description": "A sample.", "parameters": {"type": "object", "properties": {}}},
}
SAMPLE_CALL = {"id": "call00000", "type": "function", "function": {"name": "sample", "arguments": {}}}
SAMPLE_QUESTION = {"role": "user", "content": "a"}
SAMPLE_ANSWER = {"role": "assistant", "content": "", "tool_calls": [SAMPLE_CALL]}


# After the text that is to be continued, to find its end in what a template made of it; transformers' own.
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class _Generation(Extension):
    """`{% generation %}` marks for training what an assistant said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # the library's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A template in the dialect of Hugging Face, rendered in Jinja's sandbox: it comes with the model. Thread-safe.

    `special_tokens` are the texts that templates know by name, such as `bos_token`. `for_tools` is the template of
    conversations with tools, where the model has one of its own.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], for_tools: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now, **special_tokens)
        self._template = environment.from_string(source)
        self._for_tools = environment.from_string(for_tools or source)
        known = meta.find_undeclared_variables(environment.parse(for_tools or source))
        self._knows_tools = for_tools is not None or "tools" in known
        known |= meta.find_undeclared_variables(environment.parse(source))
        self._variables = known - OWN_VARIABLES - set(environment.globals)

    @cached_property
    def _calls_are_read(self) -> bool:
        """Whether calls as the template writes them, or tells the model to, are those that are read here.

        `<tool_call>` alone says nothing: Qwen3-Coder and GLM have XML in it.
        """
        for messages in ([SAMPLE_QUESTION, SAMPLE_ANSWER], [SAMPLE_QUESTION]):
            try:
                text = self._for_tools.render(messages=messages, tools=[SAMPLE_TOOL], add_generation_prompt=True)
            except Exception:  # noqa: S112  # a template can fail like any program
                continue
            return bool(ToolCallParser().push(text)[1] or SHOWN_CALL.search(text))
        return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt that the model continues as the assistant, who may call the `tools`.

        `variables` are for the template. The completion begins a message unless `add_generation_prompt` is
        false, or continues the last one if `continue_final_message` is true.

        Raises:
            FieldError: the template refuses the messages, knows no tools or variables of such names, has calls in a
                form that nobody reads, or does not show the end of the message to continue.
        """
        self._check_variables(variables or {})
        if tools and not self._knows_tools:
            raise FieldError("tools", "tools is set, and the model's chat template knows none; serve a model that does")
        if tools and not self._calls_are_read:
            message = f"tools is set, and the model writes calls in another form than {CALL_FORM}, the one read here"
            raise FieldError("tools", f"{message}; leave tools out, or serve a model of that form")
        template = self._for_tools if tools else self._template
        if continue_final_message:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + CONTINUE_MARK}]
        try:
            text = template.render(
                **(variables or {}), messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template can fail like any program
            what = "messages and chat_template_kwargs" if variables else "messages"
            raise FieldError("messages", f"{what} do not fit the model's chat template: {error}") from error
        return _until_mark(text, last["content"]) if continue_final_message else text

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        unknown = sorted(set(variables) - self._variables)
        if not unknown:
            return
        if unknown[0] in OWN_VARIABLES:
            what = "is set by a field of the request; set that"
        elif self._variables:
            what = f"cannot be set for the model's chat template; {', '.join(sorted(self._variables))} can be"
        else:
            what = "cannot be set for the model's chat template; leave it out"
        raise FieldError("chat_template_kwargs", f"chat_template_kwargs has {unknown[0]!r}, which {what}")


def _until_mark(text: str, message: str) -> str:
    """What a template wrote up to the end of the message to continue; its own trimming is kept."""
    end = text.rfind(CONTINUE_MARK.strip())
    if end < 0 or message.strip() not in text:
        what = "continue_final_message is true, and the model's chat template does not show all of that message"
        raise FieldError("continue_final_message", f"{what}; end with another message, or leave it out")
    return text[:end] if text.startswith(CONTINUE_MARK, end) else text[:end].rstrip()


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a model folder: a file of its own, or an entry of the tokenizer's settings.

    Raises:
        InputError: it cannot be read.
    """
    try:
        config_file, template_file = folder / CONFIG_FILE, folder / TEMPLATE_FILE
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        source = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        named = {"default": source}
        if isinstance(source, list):  # several by name
            named = {entry["name"]: entry["template"] for entry in source}
        default = named.get("default")
        return ChatTemplate(default, _special_tokens(config), named.get("tool_use")) if default else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, TemplateError) as error:
        raise InputError(f"the chat template of {folder} cannot be read: {error}; correct or remove it") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """What transformers has under this name; Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
