"""Targets for texts and tokens that a client makes a model write, and for templates; texts come piece by piece."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from sharp.serving.text.chat_forms import PARSERS, MessageParser
from sharp.serving.text.detokenizer import Detokenizer
from sharp.serving.text.reasoning import FORMS, ReasoningParser
from sharp.serving.text.stop_condition import StopStrings
from sharp.serving.text.tokenizer import load_tokenizer
from tests.full.fuzz.targets import Target
from tests.full.fuzz.templates import InProcess
from tests.serving.conftest import byte_tokenizer

CALLS = (
    b'\0\7words <tool_call>\n{"name": "find", "arguments": {"a": "<tool_call>"}}\n</tool_call> more',
    b'\1\3{"name": "find", "parameters": {"a": 1}}; {"name": "b", "parameters": {}}',
    b'\2\5<think>a</think>[TOOL_CALLS][{"name": "find", "arguments": {"a": [1]}}]',
    b'\3\2[find(a=1, b="x"), b()]',
    b'\4\1<think>\nwhy</think>\n<tool_call>{"name": "find", "arguments": {}}</tool_call>',
)


def pieces(text: str, size: int) -> Iterator[str]:
    """Yield the text in pieces of up to `size` characters, in an irregular pattern."""
    start, step = 0, 0
    while start < len(text):
        step = (step * 7 + 3) % (size + 1)
        yield text[start : start + step + 1]
        start += step + 1


def parsed(kind: int, parts: Iterator[str], *, cut: bool) -> tuple[str, str, tuple[str, ...]]:
    """Return the thoughts, the content and the calls in a completion."""
    names = sorted(set(PARSERS) - {"qwen", "llama3_json"})
    forms = sorted(FORMS)
    form = kind // 8 % (len(forms) + 1)
    reasoning = None if form == 0 else ReasoningParser(FORMS[forms[form - 1]], "")
    parser = MessageParser(PARSERS[names[kind % len(names)]](several=kind < 128), reasoning)
    found = [parser.push(part) for part in parts]
    found.append(parser.end(cut=cut))
    calls = tuple(f"{call.name} {call.arguments}" for part in found for call in part.calls)
    return "".join(part.reasoning for part in found), "".join(part.content for part in found), calls


def completions(_folder: Path) -> Target:
    """Return the target of tool calls and thoughts in a completion: cutting it into pieces changes no part of it."""

    def run(content: bytes) -> None:
        kind, size, text = content[:1], content[1:2], content[2:].decode(errors="replace")
        number, cut = kind[0] if kind else 0, bool(size and size[0] & 128)
        whole = parsed(number, iter([text]), cut=cut)
        by_piece = parsed(number, pieces(text, size[0] % 16 if size else 0), cut=cut)
        assert by_piece == whole, (whole, by_piece)

    return Target(run, CALLS)


def stops(_folder: Path) -> Target:
    """Return the target of stop strings: no letter before a match is lost, and no match is found too late."""

    def found(strings: tuple[str, ...], parts: Iterator[str], *, shown: bool) -> tuple[str, str | None]:
        stop, text = StopStrings(strings, shown=shown), ""
        for part in parts:
            more, matched = stop.push(part)
            text += more
            if matched is not None:
                return text, matched
        return text + stop.flush(), None

    def run(content: bytes) -> None:
        size, rest = content[:1], content[1:].decode(errors="replace").split("|")
        strings = tuple(text for text in rest[:-1] if text)[:8]
        number = size[0] if size else 0
        shown, matched = found(strings, pieces(rest[-1], number % 16), shown=bool(number & 128))
        kept = shown if number & 128 else shown + (matched or "")
        assert rest[-1].startswith(kept), (rest[-1], shown, matched)
        assert matched is not None or (shown == rest[-1] and not any(text in shown for text in strings)), (
            rest[-1],
            shown,
        )

    return Target(run, (b"\3ab|aab|xxaabyy", b"\x80aa|a|bbaaa", "\2é|zé".encode(), b"\0abc|ababab"))


def tokens(folder: Path) -> Target:
    """Return the target of a detokenizer: the texts of tokens one by one are the text of all tokens."""
    from types import SimpleNamespace

    byte_tokenizer().save(str(folder / "tokenizer.json"))
    manifest = SimpleNamespace(tokenizer=SimpleNamespace(file="tokenizer.json"), vocab_size=257, name="bytes")
    tokenizer = load_tokenizer(folder, manifest)
    assert tokenizer is not None

    def run(content: bytes) -> None:
        ids = [byte if byte < 255 or index % 2 else 256 for index, byte in enumerate(content[:256])]
        detokenizer = Detokenizer(tokenizer, special_tokens=len(content) % 2 == 0)
        text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        whole = tokenizer.decode(ids, special_tokens=len(content) % 2 == 0)
        # An incomplete character at the end has no text.
        assert text.rstrip("\ufffd") == whole.rstrip("\ufffd"), (text, whole)

    return Target(run, (b"a text", "é🙂ß".encode(), b"\xf0\x9f\x99a\xff\xff\x80", bytes(range(256))))


def template(_folder: Path) -> Target:
    """Return the target of a chat template's source and of the text that it makes from a conversation."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}]
    seeds = (
        b"{% for message in messages %}{{ message.role }}: {{ message['content'] | trim }}\n{% endfor %}",
        b"{% set x = namespace(a=1) %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ x.a }}",
        b"{% macro m(a, b=2) %}{{ a ~ b }}{% endmacro %}{{ m('c') }}{% generation %}x{% endgeneration %}",
        b"{{ raise_exception('no') }}{% for i in range(3) %}{% break %}{% endfor %}{{ strftime_now('%Y') }}",
    )

    def run(content: bytes) -> None:
        source = content.decode(errors="replace")
        if any(costly in source for costly in ("range", "*", "format", "%0", "center", "indent", "wordwrap", "lipsum")):
            return  # the templates' own process limits time and memory; there is no limit here
        try:
            made = InProcess(source)
        except Exception:
            return
        json.dumps(made.variables)
        made.render("tools", {"messages": messages, "tools": [], "add_generation_prompt": True})

    return Target(run, seeds)


MAKERS: dict[str, Callable[[Path], Target]] = {
    "completions": completions,
    "stop-strings": stops,
    "detokenizer": tokens,
    "chat-template": template,
}
