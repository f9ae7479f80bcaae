"""Renders chat templates under limits of time and memory, as the program of `sharp.serving.text.template_process`.

A template comes with the model and is a program: it can loop forever, or produce a text of any size. This program
imports nothing of Sharp, so that it starts at once and stays small. Messages are lines of JSON on stdin and stdout. The
kernel ends this process when a rendering takes too long. Lack of memory raises `MemoryError` or ends the process.
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

STATM = Path("/proc/self/statm")  # number of pages of virtual memory


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. It changes nothing here."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it like this

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes of the template between `{% generation %}` and `{% endgeneration %}`, unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TooLongError(Exception):
    """The rendered text has too many characters."""


class Templates:
    """The compiled templates of a model by name, and the variables that each template reads."""

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
        """Return the text of a template, which may have at most `most` characters.

        `name` is the template's name, and `values` are its variables.

        Raises:
            _TooLongError: the text is longer.
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
    """Reply to messages until stdin ends, which happens when the server ends."""
    # SIGINT and SIGTERM reach the whole process group, but the server ends this process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    limits = json.loads(sys.stdin.buffer.readline())
    # Python would print an error there when memory runs out, which the server reports in its own words.
    sys.stderr.close()
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
            except Exception as error:  # templates can fail like any program
                reply = {"error": str(error)[:4096] or type(error).__name__}
            response = json.dumps(reply).encode()
        sys.stdout.buffer.write(response + b"\n")
        sys.stdout.buffer.flush()


@contextmanager
def _limited(seconds: float, wall_seconds: float) -> Iterator[None]:
    """End the process if the `with` block takes longer than `seconds` of CPU time or `wall_seconds` of elapsed time."""
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
    """Return JSON as transformers' filter of the same name writes it. Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    """Raise TemplateError; templates call it as raise_exception."""
    raise TemplateError(message)


def _now(form: str) -> str:
    """Return the local time in the format of strftime; templates call it as strftime_now."""
    return datetime.now().astimezone().strftime(form)


if __name__ == "__main__":
    main()
