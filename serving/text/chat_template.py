"""`ChatTemplate`: a conversation as the text that a model was trained on."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.text.template_process import TemplateLimitError, TemplateProcess
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
MOST_CONFIG_BYTES = 2**26
MOST_TEMPLATE_CHARACTERS = 2**20  # the longest of known models have some ten thousand
OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class ChatTemplate:
    """A template in the dialect of Hugging Face. It comes with the model, and runs in a limited process. Thread-safe.

    `special_tokens` are the texts that templates know by name, such as `bos_token`. `for_tools` is the template of
    conversations with tools, where the model has one of its own.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], for_tools: str | None = None) -> None:
        """Compile the template and render a short conversation.

        Raises:
            InputError: it is no template, or takes too much time or memory.
        """
        self._process = TemplateProcess({"default": source, "tools": for_tools or source}, special_tokens)
        known = self._process.variables
        self._knows_tools = for_tools is not None or "tools" in known["tools"]
        self._variables = {*known["default"], *known["tools"]} - OWN_VARIABLES
        try:
            self._render("default", [SAMPLE_QUESTION])
        except TemplateLimitError:
            self.close()
            raise
        except InputError:  # it may want other messages
            pass

    def close(self) -> None:
        """End the process. A later rendering starts another."""
        self._process.close()

    @cached_property
    def _calls_are_read(self) -> bool:
        """Whether calls as the template writes them, or tells the model to, are those that are read here.

        `<tool_call>` alone says nothing: Qwen3-Coder and GLM have XML in it.
        """
        conversations: tuple[list[Mapping[str, Any]], ...] = ([SAMPLE_QUESTION, SAMPLE_ANSWER], [SAMPLE_QUESTION])
        for messages in conversations:
            try:
                text = self._render("tools", messages, tools=[SAMPLE_TOOL])
            except InputError:  # a template can fail like any program
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
        if continue_final_message:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + CONTINUE_MARK}]
        try:
            text = self._render(
                "tools" if tools else "default",
                messages,
                **(variables or {}),
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        except InputError as error:
            what = "messages and chat_template_kwargs" if variables else "messages"
            raise FieldError("messages", f"{what} do not fit the model's chat template: {error}") from error
        return _until_mark(text, last["content"]) if continue_final_message else text

    def known(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the variables that the template reads."""
        return {name: value for name, value in variables.items() if name in self._variables}

    def _render(self, name: str, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        return self._process.render(name, {"add_generation_prompt": True, **values, "messages": messages})

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
        config = json.loads(_read(config_file, MOST_CONFIG_BYTES)) if config_file.is_file() else {}
        own = _read(template_file, 4 * MOST_TEMPLATE_CHARACTERS) if template_file.is_file() else None
        source = config.get("chat_template") if own is None else own
        named = {"default": source}
        if isinstance(source, list):  # several by name
            named = {entry["name"]: entry["template"] for entry in source}
        default, for_tools = named.get("default"), named.get("tool_use")
        for text in (default, for_tools):
            if text is not None and len(_text(text)) > MOST_TEMPLATE_CHARACTERS:
                raise InputError(f"it has more than {MOST_TEMPLATE_CHARACTERS} characters")
        return ChatTemplate(default, _special_tokens(config), for_tools) if default else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:  # InputError, too
        raise InputError(f"the chat template of {folder} cannot be read: {error}; correct or remove it") from error


def _read(path: Path, most: int) -> str:
    if path.stat().st_size > most:
        raise InputError(f"{path.name} has more than {most} bytes")
    return path.read_text(encoding="utf-8")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InputError("it is no text")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
