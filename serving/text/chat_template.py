"""`ChatTemplate`: writes a conversation as the text format that a model was trained on."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import FieldError, InputError, SharpError
from sharp.serving.text.message_format import (
    SAMPLE_ANSWER,
    SAMPLE_QUESTION,
    SAMPLE_TOOL,
    found_format,
    marked,
)
from sharp.serving.text.template_process import TemplateLimitError, TemplateProcess

logger = logging.getLogger(__name__)

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FOLDER = "additional_chat_templates"  # folder of further templates, by name
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Appended to the message to continue, to find the end of the message in the rendered text. transformers uses the same
# mark.
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
MOST_CONFIG_BYTES = 2**26
MOST_TEMPLATE_CHARACTERS = 2**20  # the longest templates of known models have some ten thousand characters
OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
ERROR, WARN, IGNORE = "error", "warn", "ignore"
MOST_SHAPES = 256  # the most shapes of conversations whose dropped messages are cached


class ChatTemplate:
    """A chat template in Hugging Face's dialect, which comes with the model and runs in a limited process. Thread-safe.

    `special_tokens` are texts that templates use by name, such as `bos_token`. `for_tools` is a separate template for
    conversations with tools, if the model has one.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        for_tools: str | None = None,
        *,
        on_dropped: str = IGNORE,
    ) -> None:
        """Compile the template and render a few short conversations.

        `on_dropped` says what happens to messages that the template leaves out: "error", "warn" or "ignore".

        Raises:
            InputError: the text is not a template, or takes too much time or memory.
            QueueFullError: the machine is too busy.
            UnavailableError: the template's process was killed, or cannot be started.
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
        except InputError:  # the template may require other messages than the sample
            pass
        sources = {"default": source, "tools": for_tools or source}
        self._formats = {name: found_format(partial(self._sample, name), text) for name, text in sources.items()}
        self._on_dropped = on_dropped
        self._dropped: dict[bytes, list[int]] = {}  # numbers of dropped messages, by the shape of a conversation
        self._warned: set[str] = set()

    def close(self) -> None:
        """End the template's process. A later rendering starts a new process."""
        self._process.close()

    def sample_call(self) -> str:
        """Return the rendered text of a question with a tool and its call, or of the question alone if that fails.

        The text is empty if both fail.
        """
        conversations: tuple[list[Mapping[str, Any]], ...] = ([SAMPLE_QUESTION, SAMPLE_ANSWER], [SAMPLE_QUESTION])
        for messages in conversations if self._knows_tools else ():
            try:
                return self._render("tools", messages, tools=[SAMPLE_TOOL])
            except SharpError:  # templates can fail like any program, and the machine may be busy
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
        """Return the prompt that the model continues as the assistant, who may call the `tools`.

        `variables` are passed to the template. The completion begins a new message unless `add_generation_prompt` is
        false, or continues the last message if `continue_final_message` is true.

        Raises:
            FieldError: the template refuses the messages, does not support tools or variables of these names, or does
                not show the end of the message to continue.
            QueueFullError: too many conversations wait to be rendered, or the machine is too busy.
            UnavailableError: the template's process was killed, or cannot be started.
        """
        self._check_variables(variables or {})
        if tools and not self._knows_tools:
            raise FieldError("tools", "tools is set, and the model's chat template knows none; serve a model that does")
        name = "tools" if tools else "default"
        messages = [self._formats[name].message(message) for message in messages]
        values = {**(variables or {}), "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._render(name, _to_continue(messages) if continue_final_message else messages, **values)
        except InputError as error:
            what = "messages and chat_template_kwargs" if variables else "messages"
            raise FieldError("messages", f"{what} do not fit the model's chat template: {error}") from error
        self._check_dropped(name, messages, values)
        return _until_mark(text, _text_of(messages[-1])) if continue_final_message else text

    def known(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of `variables` that the template reads."""
        return {name: value for name, value in variables.items() if name in self._variables}

    def _render(self, name: str, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """Render the template `name` with messages and further variables, in the template process."""
        return self._process.render(name, {"add_generation_prompt": True, **values, "messages": messages})

    def _sample(self, name: str, messages: Sequence[Mapping[str, Any]], with_tool: bool) -> str:
        """Render a sample conversation, with a sample tool if requested and known to the template."""
        return self._render(name, messages, **({"tools": [SAMPLE_TOOL]} if with_tool and self._knows_tools else {}))

    def _check_dropped(self, name: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
        """Find the messages that the template leaves out, by rendering marks in place of the texts.

        Raises:
            FieldError: the template leaves a message out, and `on_dropped` is "error".
        """
        if self._on_dropped == IGNORE:
            return
        made, marks = marked(messages)
        shape = hashlib.sha256(json.dumps([name, made, values]).encode()).digest()
        dropped = self._dropped.get(shape)
        if dropped is None:
            try:
                text = self._render(name, made, **values)
                dropped = [number for number, own in marks.items() if not all(mark in text for mark in own)]
            except InputError:  # the template reads texts or arguments, and refuses the marks
                dropped = []
            if len(self._dropped) >= MOST_SHAPES:
                self._dropped.clear()
            self._dropped[shape] = dropped
        for number in dropped:
            what = "calls" if messages[number].get("tool_calls") else "text"
            role = messages[number]["role"]
            message = f"leaves out the {what} of a message of the role {role!r:.40}"
            if self._on_dropped == ERROR:
                place = f"messages has {len(messages)} entries, and the model's chat template {message}, number"
                hint = "send it in another role, or start the server with --on-dropped-content warn"
                raise FieldError("messages", f"{place} {number + 1}; {hint}")
            if message not in self._warned and len(self._warned) < MOST_SHAPES:
                self._warned.add(message)
                logger.warning("the model's chat template %s", message)

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Check that these are variables of the template that a client may set, else raise FieldError."""
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


@dataclass(frozen=True)
class NoChatTemplate:
    """A stand-in for the template of a model without a usable template. `reason` is one sentence."""

    reason: str = "the model has no chat template; use /v1/completions"

    def render(self, *_messages: object, **_options: object) -> str:
        """Refuse to render.

        Raises:
            InputError: always, with the reason.
        """
        raise InputError(self.reason)

    def known(self, _variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return an empty dict, because there is no template to read variables."""
        return {}

    def close(self) -> None:
        """Do nothing, because there is no process."""


def usable_chat_template(
    folder: Path, chosen: str | None = None, on_dropped: str = ERROR
) -> ChatTemplate | NoChatTemplate:
    """Return the chat template of a model folder. If the model's own cannot be used, log that chat is off.

    `on_dropped` is an argument of `ChatTemplate`.

    Raises:
        InputError: the `chosen` template cannot be used.
        QueueFullError, UnavailableError: the process of the `chosen` template cannot be started, or was killed.
    """
    try:
        return load_chat_template(folder, chosen, on_dropped) or NoChatTemplate()
    except SharpError as error:
        if chosen is not None:
            raise
        logger.warning("chat is off: %s", error)
        return NoChatTemplate(f"chat is off: {error}")


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its parts joined; "" if it has none."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _to_continue(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with `CONTINUE_MARK` at the end of the last message."""
    *before, last = messages
    content: Any = _text_of(last) + CONTINUE_MARK
    if isinstance(last.get("content"), list):
        content = [{"type": "text", "text": content}]
    return [*before, {**last, "content": content}]


def _until_mark(text: str, message: str) -> str:
    """Return the start of a rendered text that ends with the message to continue, before `CONTINUE_MARK`.

    `message` is the text of that message. The end is trimmed as the template trims messages.

    Raises:
        FieldError: the template does not show all of the message.
    """
    end = text.rfind(CONTINUE_MARK.strip())
    if end < 0 or message.strip() not in text:
        what = "continue_final_message is true, and the model's chat template does not show all of that message"
        raise FieldError("continue_final_message", f"{what}; end with another message, or leave it out")
    return text[:end] if text.startswith(CONTINUE_MARK, end) else text[:end].rstrip()


def load_chat_template(folder: Path, chosen: str | None = None, on_dropped: str = IGNORE) -> ChatTemplate | None:
    """Return the chat template of a model folder, from its own file or from the tokenizer's settings.

    Return None if the model has none.

    `chosen` replaces it: the path of another template, the name of another template of the model, or "chatml".
    `on_dropped` is an argument of `ChatTemplate`.

    Raises:
        InputError: the template cannot be read, no template has the `chosen` name, or the `chosen` template is empty.
        QueueFullError, UnavailableError: the template's process cannot be started, or was killed.
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
                raise InputError("the one that --chat-template names is empty; give another")
        named = {"default": source, "tool_use": _named(folder, "tool_use")}
        if isinstance(source, list):  # the settings hold several templates by name
            named = {entry["name"]: entry["template"] for entry in source}
        default, for_tools = named.get("default"), named.get("tool_use")
        for text in (default, for_tools):
            if text is not None and len(_text(text)) > MOST_TEMPLATE_CHARACTERS:
                raise InputError(f"it has more than {MOST_TEMPLATE_CHARACTERS} characters")
        if not default:
            return None
        return ChatTemplate(default, _special_tokens(config), for_tools, on_dropped=on_dropped)
    # ValueError includes InputError
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"the chat template of {folder} cannot be read: {error}; correct or remove it") from error


def _named(folder: Path, name: str) -> str | None:
    """Return the model's template with the given name, or None if there is none."""
    if "/" in name or name.startswith("."):
        return None
    path = folder / TEMPLATE_FOLDER / f"{name}.jinja"
    if path.is_file():
        return _read(path, 4 * MOST_TEMPLATE_CHARACTERS)
    try:
        config = json.loads(_read(folder / CONFIG_FILE, MOST_CONFIG_BYTES))
        return next((entry["template"] for entry in config.get("chat_template") if entry["name"] == name), None)
    # Not an error here: `load_chat_template` reads the same files and reports errors.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _read(path: Path, most: int) -> str:
    """Return the text of a file of at most `most` bytes. InputError if it is larger."""
    if path.stat().st_size > most:
        raise InputError(f"{path.name} has more than {most} bytes")
    return path.read_text(encoding="utf-8")


def _text(value: object) -> str:
    """Return the value. InputError if it is no text."""
    if not isinstance(value, str):
        raise InputError("it is no text")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens in a tokenizer's config by name, as "bos_token"."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
