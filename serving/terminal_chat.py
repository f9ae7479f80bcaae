"""The chat of `sharp run` in the terminal, with the entropy of the heads behind every completion."""

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import click
import numpy as np

from sharp.serving.api.attention import AttentionSummary
from sharp.serving.api.errors import InputError, SharpError
from sharp.serving.api.events import Delta, Finished, FinishReason
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.llm import LLM
from sharp.serving.text.chat_template import ChatTemplate

NUMBERS: Mapping[str, Callable[[str], float]] = {
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "top_k": int,
    "max_tokens": int,
    "seed": int,
}
# Control characters but line feed and tab, which a terminal would obey, as marks of what cannot be shown.
CONTROLS = {code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
HELP = """\
/help                 this list
/clear                begin a new conversation
/system TEXT          begin a new conversation with this system message
/retry                remove the last response and generate another one
/set NAME VALUE       change the sampling: temperature, top_p, top_k, min_p, repetition_penalty, max_tokens, seed
/show                 the model, the sampling and the length of the conversation
/exit                 leave; also Ctrl-D
Ctrl-C stops a response. A text of several lines begins and ends with \"\"\"."""
SHARP, DISPERSED = 0.5, 0.8  # of the mean normalized entropy: green below, red above


@dataclass
class Chat:
    """A conversation with a model.

    Attributes:
        llm: the model.
        template: the model's chat template; None completes each text as it stands.
        params: how tokens are sampled.
        messages: the conversation so far, as chat templates take it.
    """

    llm: LLM
    template: ChatTemplate | None
    params: SamplingParams
    messages: list[dict[str, str]] = field(default_factory=list)

    def prompt(self) -> list[int]:
        """Return the token ids of the conversation; without a chat template, those of the last message only.

        Raises:
            InputError: the template refuses the messages.
        """
        tokenizer = self.llm.model.tokenizer
        assert tokenizer is not None
        if self.template is None:
            return tokenizer.encode(self.messages[-1]["content"])
        return tokenizer.encode(self.template.render(self.messages), special_tokens=False)

    def answer(self) -> Generator[Delta | Finished]:
        """Yield the next message of the assistant as it is generated.

        Raises:
            InputError: the conversation is longer than the model's context, or the template refuses it.
        """
        yield from self.llm.stream(self.prompt(), self.params, attention=True)


def start(chat: Chat, system: str | None) -> None:
    """Begin a conversation with a system message, or without if it is None, and chat until the user leaves."""
    begin(chat, system)
    if sys.stdin.isatty():
        _prepare_lines()
        name = chat.llm.model.manifest.name
        click.echo(f"{name}: write a message, or /help.", err=True)
        if chat.template is None:
            click.echo("The model has no chat template, so it continues each text as it stands.", err=True)
    converse(chat)


def begin(chat: Chat, system: str | None) -> None:
    """Remove all messages of a chat, and put a system message at its beginning if it is not None."""
    chat.messages = [{"role": "system", "content": system}] if system else []


def converse(chat: Chat) -> None:
    """Read messages and commands from stdin, and respond to each, until stdin ends or /exit."""
    while (text := _read()) is not None:
        if not text.strip():
            continue
        try:
            if text.startswith("/"):
                if not _obey(chat, text):
                    return
                continue
            chat.messages.append({"role": "user", "content": text})
            respond(chat)
        except SharpError as error:
            if chat.messages and chat.messages[-1]["role"] == "user":
                chat.messages.pop()
            click.secho(f"{error}", fg="red", err=True)


def respond(chat: Chat) -> None:
    """Generate the assistant's message, print it and what the heads did, and append it to the conversation.

    Ctrl-C ends the message, which stays in the conversation as far as it was generated.
    """
    text, tokens, began = "", 0, time.monotonic()
    shown = CONTROLS if sys.stdout.isatty() else {}
    finished: Finished | None = None
    with suppress(KeyboardInterrupt), closing(chat.answer()) as events:
        for event in events:
            if isinstance(event, Finished):
                finished = event
                break
            text += event.text
            tokens += len(event.token_ids)
            click.echo(event.text.translate(shown), nl=False)
    click.echo()
    chat.messages.append({"role": "assistant", "content": text})
    seconds = time.monotonic() - began
    if finished is None:
        click.secho("[stopped]", dim=True, err=True)
        return
    if finished.reason is FinishReason.LENGTH:
        click.secho("[cut off at --max-tokens, or at the end of the context]", dim=True, err=True)
    if finished.attention is not None:
        line, colour = entropy_line(finished.attention)
        click.secho(f"{line}; {tokens} tokens, {tokens / max(seconds, 1e-9):.0f} a second", fg=colour, err=True)


def entropy_line(summary: AttentionSummary) -> tuple[str, str]:
    """Return a line on the entropy of the heads in a completion, and its colour: green is sharp, red dispersed."""
    shares = summary.normalized_entropy
    if not np.isfinite(shares).any():
        return "no token saw two keys", "white"
    mean = float(np.nanmean(shares))
    ends = [np.unravel_index(find(shares), shares.shape) for find in (np.nanargmin, np.nanargmax)]
    (sharp_layer, sharp_head), (wide_layer, wide_head) = ends
    colour = "green" if mean < SHARP else "red" if mean > DISPERSED else "yellow"
    return (
        f"attention entropy {mean:.2f} of ln n; sharpest head {sharp_layer}.{sharp_head} "
        f"({shares[ends[0]]:.2f}), most dispersed {wide_layer}.{wide_head} ({shares[ends[1]]:.2f})"
    ), colour


def _obey(chat: Chat, text: str) -> bool:
    """Carry out a command; return False if the chat is to end.

    Raises:
        InputError: there is no such command, or its value cannot be used.
    """
    name, _, rest = text[1:].strip().partition(" ")
    if name in ("exit", "quit", "bye"):
        return False
    if name in ("help", "?"):
        click.echo(HELP)
    elif name == "clear":
        begin(chat, next((message["content"] for message in chat.messages[:1] if message["role"] == "system"), None))
    elif name == "system":
        begin(chat, rest.strip() or None)
    elif name == "retry":
        while chat.messages and chat.messages[-1]["role"] == "assistant":
            chat.messages.pop()
        if not chat.messages or chat.messages[-1]["role"] != "user":
            raise InputError("there is no message to respond to again; write one first")
        respond(chat)
    elif name == "set":
        chat.params = changed(chat.params, rest)
    elif name == "show":
        click.echo(_described(chat))
    else:
        raise InputError(f"there is no command /{name}; /help lists them")
    return True


def changed(params: SamplingParams, setting: str) -> SamplingParams:
    """Return sampling parameters with one changed, given as NAME VALUE.

    Raises:
        InputError: there is no such parameter, or the value is no number or out of range.
    """
    name, _, value = setting.strip().replace("-", "_").partition(" ")
    if name not in NUMBERS:
        raise InputError(f"{name!r} is no parameter of sampling; give one of {', '.join(NUMBERS)}, and a number")
    value = setting.strip().partition(" ")[2].strip()
    try:
        number = NUMBERS[name](value)
    except ValueError as error:
        raise InputError(f"{name} is {value!r}; it must be a number") from error
    values: dict[str, Any] = {name: number}
    return replace(params, **values)


def _described(chat: Chat) -> str:
    """Return the words about model, length of the conversation in tokens, and sampling."""
    params = chat.params.with_defaults(chat.llm.model.sampling)
    shown: dict[str, Any] = {name: getattr(params, name) for name in NUMBERS}
    manifest = chat.llm.model.manifest
    length = len(chat.prompt()) if chat.messages else 0
    sampling = ", ".join(f"{name} {value}" for name, value in shown.items() if value is not None)
    context = f"{length} of {chat.llm.model.context_limit} tokens of context"
    return f"{manifest.name} with norm {manifest.norm.name}; {context}\n{sampling}"


def _read() -> str | None:
    """Return the next text from stdin; None at its end."""
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        line = input(prompt)
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(input("… " if prompt else ""))
        return "\n".join(lines).rstrip().removesuffix('"""')
    except EOFError:
        if prompt:
            click.echo()
        return None
    except KeyboardInterrupt:  # at the prompt
        click.echo(err=True)
        return "" if prompt else None


def _prepare_lines() -> None:
    """Let the terminal edit lines and recall earlier ones, where Python was built with readline."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it
