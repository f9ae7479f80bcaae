"""Renders chat templates under limits of time and memory: the program of `sharp.serving.text.template_process`.

A template comes with the model and is a program: it can loop for ever, or make a text of any size. Imports nothing of
Sharp, so that it starts at once and is small. Messages are lines of JSON on stdin and stdout. The kernel ends this
process when a rendering takes too long; memory ends as `MemoryError`, or with the process.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

STATM = Path("/proc/self/statm")  # pages of virtual memory


class _Generation(Extension):
    """`{% generation %}` marks for training what an assistant said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # the library's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TooLongError(Exception):
    """A rendered text has too many characters."""


class Templates:
    """The templates of a model by name, compiled, and the variables that each knows."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now, **special_tokens)
        self.templates: dict[str, Template] = {}
        self.variables: dict[str, list[str]] = {}
        for name, source in sources.items():
            known = meta.find_undeclared_variables(environment.parse(source)) - set(environment.globals)
            self.variables[name] = sorted(known)
            self.templates[name] = environment.from_string(source)

    def render(self, name: str, values: dict[str, Any], most: int) -> str:
        """The text that a template makes, which may have `most` characters.

        Raises:
            _TooLongError: it is longer.
        """
        parts: list[str] = []
        length = 0
        for part in self.templates[name].generate(values):
            length += len(part)
            if length > most:
                raise _TooLongError(f"its text is longer than {most} characters")
            parts.append(part)
        return "".join(parts)


def main() -> None:
    """Reply until stdin ends, which it does with the server."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the whole group; the server ends this process
        signal.signal(number, signal.SIG_IGN)
    limits = json.loads(sys.stdin.buffer.readline())
    sys.stderr.close()  # where memory ends, Python says so there; the server has a sentence of its own
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    allowed = int(STATM.read_text().split()[0]) * resource.getpagesize() + limits["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    templates: Templates | None = None
    for line in sys.stdin.buffer:
        with _limited(limits["seconds"], limits["wall_seconds"]):
            try:
                given = json.loads(line)
                if templates is None:
                    templates = Templates(**given)
                    reply: dict[str, Any] = {"variables": templates.variables}
                else:
                    reply = {"text": templates.render(given["name"], given["values"], limits["characters"])}
            except MemoryError:
                reply = {"limit": f"it takes more than {limits['memory'] >> 20} MB"}
            except _TooLongError as error:
                reply = {"limit": str(error)}
            except RecursionError:
                reply = {"error": "it is nested too deeply"}
            except Exception as error:  # a template can fail like any program
                reply = {"error": str(error)[:4096] or type(error).__name__}
            response = json.dumps(reply).encode()
        sys.stdout.buffer.write(response + b"\n")
        sys.stdout.buffer.flush()


@contextmanager
def _limited(seconds: float, wall_seconds: float) -> Iterator[None]:
    """End the process if what is inside takes longer, of a processor or by the clock."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


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


if __name__ == "__main__":
    main()
