"""`ChatTemplate`: a conversation as the text that a model was trained on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.text.template_process import TemplateLimitError, TemplateProcess

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FOLDER = "chat_templates"  # of more templates, by their names
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
        self.source = source
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

    def sample_call(self) -> str:
        """What the template makes of a question with a tool and its call, or of the question alone if it cannot.

        It is empty where it can do neither.
        """
        conversations: tuple[list[Mapping[str, Any]], ...] = ([SAMPLE_QUESTION, SAMPLE_ANSWER], [SAMPLE_QUESTION])
        for messages in conversations if self._knows_tools else ():
            try:
                return self._render("tools", messages, tools=[SAMPLE_TOOL])
            except InputError:  # a template can fail like any program
                continue
        return ""

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
            FieldError: the template refuses the messages, knows no tools or variables of such names, or does not show
                the end of the message to continue.
        """
        self._check_variables(variables or {})
        if tools and not self._knows_tools:
            raise FieldError("tools", "tools is set, and the model's chat template knows none; serve a model that does")
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


def load_chat_template(folder: Path, chosen: str | None = None) -> ChatTemplate | None:
    """The chat template of a model folder: a file of its own, or an entry of the tokenizer's settings.

    `chosen` is the path of another one, or the name of another of the model's, or "chatml".

    Raises:
        InputError: it cannot be read, there is none of the `chosen` name, or the `chosen` one is empty.
    """
    if chosen is not None and chosen != "chatml" and not Path(chosen).is_file() and _named(folder, chosen) is None:
        raise InputError(f"--chat-template is {chosen!r}, which is neither a file nor a template of {folder}")
    try:
        config_file, template_file = folder / CONFIG_FILE, folder / TEMPLATE_FILE
        config = json.loads(_read(config_file, MOST_CONFIG_BYTES)) if config_file.is_file() else {}
        own = _read(template_file, 4 * MOST_TEMPLATE_CHARACTERS) if template_file.is_file() else None
        source = config.get("chat_template") if own is None else own
        if chosen is not None:
            source = CHATML if chosen == "chatml" else _named(folder, chosen)
            source = _read(Path(chosen), 4 * MOST_TEMPLATE_CHARACTERS) if source is None else source
            if not source:
                raise InputError("the one that --chat-template names is empty")
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


def _named(folder: Path, name: str) -> str | None:
    """One of several templates of a model."""
    if "/" in name or name.startswith("."):
        return None
    path = folder / TEMPLATE_FOLDER / f"{name}.jinja"
    if path.is_file():
        return _read(path, 4 * MOST_TEMPLATE_CHARACTERS)
    try:
        config = json.loads(_read(folder / CONFIG_FILE, MOST_CONFIG_BYTES))
        return next((one["template"] for one in config.get("chat_template") if one["name"] == name), None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # `load_chat_template` says it
        return None


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
