"""The `sharp` command, and how every command of Sharp reports errors and what it does."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import AbstractContextManager, suppress
from difflib import get_close_matches
from importlib import import_module
from io import StringIO
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sharp.plugins.errors import SharpError, VerificationError, is_panic
from sharp.plugins.grouped_help import HELP, GroupedCommand

if TYPE_CHECKING:  # rich takes as long to import as all else that `sharp -h` needs
    from rich.status import Status


class Lazy(NamedTuple):
    """A subcommand: where it is, the extra of the package that brings what it imports, and its line in the list."""

    where: str
    extra: str
    summary: str


GROUPS = {
    "Make a model": {
        "export": Lazy("sharp.exporter.cli:export", "export", "Export a checkpoint to a model folder."),
        "adapt": Lazy("sharp.exporter.adapt.cli:adapt", "adapt", "Turn a softmax model into one with another norm."),
        "fit-temperature": Lazy(
            "sharp.exporter.temperature.cli:fit_temperature", "export", "Fit adaptive temperature."
        ),
        "fit-length-scale": Lazy(
            "sharp.exporter.temperature.length_scale:fit_length_scale",
            "export",
            "Fit a scale that grows with the length.",
        ),
        "check-normalizer": Lazy(
            "sharp.plugins.custom.cli:check_normalizer", "export", "Test a normalizer of your own, a Python file."
        ),
        "build": Lazy(
            "sharp.exporter.build:build", "export,tensorrt-rtx", "Build an engine for TensorRT or TensorRT-RTX."
        ),
    },
    "Run it": {
        "serve": Lazy("sharp.serving.cli:serve", "serve", "Serve a model folder over gRPC and OpenAI's HTTP API."),
        "generate": Lazy("sharp.serving.cli:generate", "serve", "Generate text with a server or a model folder."),
        "health": Lazy(
            "sharp.serving.server.health_check:health", "serve", "Ask the server on this machine whether it serves."
        ),
    },
    "Look at it": {
        "inspect": Lazy("sharp.exporter.inspection.cli:inspect", "export", "Show what every head does with a text."),
        "baseline": Lazy(
            "sharp.serving.observability.cli:baseline", "serve", "Record how the heads' entropies are distributed."
        ),
        "bench": Lazy("sharp.serving.bench.cli:bench", "serve", "Measure a server under load, or decoding."),
    },
    "Machines": {
        "doctor": Lazy("sharp.plugins.doctor.cli:doctor", "serve", "Check attention on every backend of this machine."),
        "plan": Lazy("sharp.serving.capacity.cli:plan", "serve", "How much memory, servers and money a load needs."),
    },
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}
INTERRUPTED = 128 + signal.SIGINT  # the exit code


class Refusal(click.ClickException):
    """Input that cannot be used."""

    exit_code = 2


class FailedVerification(click.ClickException):
    """A result that is wrong."""

    exit_code = 1


def discard_output() -> None:
    """Write nothing more to stdout, after it has failed: Python would try once more at its end, and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def echo_error(error: click.ClickException | str) -> None:
    """Print an error on stderr, as click does, with its first word in red on a terminal."""
    shown = StringIO()
    (click.ClickException(error) if isinstance(error, str) else error).show(shown)
    usage, mark, sentence = shown.getvalue().partition("Error:")
    click.echo(usage + click.style(mark, fg="red", bold=True) + sentence, err=True, nl=False, color=colour())


def colour() -> bool | None:
    """Whether click prints in colour: None is on terminals; never where the user says so (https://no-color.org)."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def status(text: str) -> AbstractContextManager[Status]:
    """Show on a terminal's stderr what a command does, while it does it."""
    from rich.console import Console
    from rich.markup import escape

    return Console(stderr=True).status(escape(text))


def announce(text: str) -> None:
    """Say on a terminal's stderr what a command does, where log lines may come meanwhile."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        console.print(text, soft_wrap=True, markup=False, highlight=False)


class _Main(click.Command):
    """A command whose errors are in colour on a terminal, also where its help cannot be printed."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """See `click.Command`."""
        standalone = options.get("standalone_mode", True)
        options = {"color": colour(), **options, "standalone_mode": False}
        if not standalone:
            return super().main(*arguments, **options)
        try:
            sys.exit(super().main(*arguments, **options))
        except click.ClickException as error:
            echo_error(error)
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(INTERRUPTED)
        except OSError as error:
            discard_output()
            with suppress(OSError):  # stderr may be on the same disk
                echo_error(str(error))
            sys.exit(Refusal.exit_code)


class SharpCommand(_Main, GroupedCommand):
    """A command whose `SharpError`s end as one sentence on stderr and exit code 2 (1 for a failed verification)."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)  # behind the ^C of the terminal
            ctx.exit(INTERRUPTED)
        except SharpError as error:
            kind = FailedVerification if isinstance(error, VerificationError) else Refusal
            raise kind(str(error)) from error
        except ModuleNotFoundError as error:
            raise missing_extra(str(self.name), error) from error
        except ImportError as error:
            raise broken_package(error) from error
        except OSError as error:  # a path that cannot be read or written: no permission, too long a name, a full disk
            if error.errno == errno.EPIPE:  # click ends quietly when nobody reads the output
                raise
            if error.errno == errno.ENOSPC:
                discard_output()  # perhaps it was stdout
            raise Refusal(str(error)) from error
        except BaseException as error:
            if isinstance(error, MemoryError) or "can't start new thread" in str(error):
                raise Refusal("there is not enough memory; see also ulimit -v and ulimit -u") from error
            if is_panic(error):
                raise Refusal(f"a library failed: {error}") from error
            raise


def exit_on_terminate() -> None:
    """Make SIGTERM and SIGHUP unwind the stack like Ctrl-C does, so that nothing half-written stays behind."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, leave)


class LazyGroup(_Main, click.Group):
    """Serving needs no torch and exporting no gRPC, so neither is imported for the other's command."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """The names of the subcommands."""
        return sorted(COMMANDS)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The lists of subcommands, none of which is imported."""
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, command.summary) for name, command in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The subcommand; a misspelt one is named."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = get_close_matches(args[0], COMMANDS, 1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from error

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported now."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None


def load_command(name: str) -> click.Command:
    """Import a subcommand.

    Raises:
        click.ClickException: what it imports is not installed, and the message names the extra that brings it; or it
            cannot be imported.
    """
    module, _, attribute = COMMANDS[name].where.partition(":")
    try:
        command: click.Command = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise missing_extra(name, error) from error
    except ImportError as error:
        raise broken_package(error) from error
    return command


def missing_extra(name: str, error: ModuleNotFoundError) -> Refusal:
    """The sentence for a subcommand whose libraries are not installed."""
    extra = COMMANDS[name].extra if name in COMMANDS else "dev"
    return Refusal(f"{error.name} is not installed; install it with: pip install 'sharp-attention[{extra}]'")


def broken_package(error: ImportError) -> Refusal:
    """The sentence for a package that is installed and cannot be imported: a library that it needs is missing."""
    return Refusal(f"{error.name or 'a package'} is installed but cannot be imported: {error}")


@click.group(cls=LazyGroup, context_settings=HELP, epilog="See also: docs/index.md, and sharp COMMAND -h.")
@click.version_option(package_name="sharp-attention", prog_name="sharp")
def main() -> None:
    """Export, serve and measure transformers whose attention stays sharp."""


def export_main() -> None:
    """The `sharp-export` script."""
    run_script("export")


def serve_main() -> None:
    """The `sharp-serve` script."""
    run_script("serve")


def run_script(name: str) -> None:
    """Run one subcommand as the script `sharp-<name>`."""
    try:
        command = load_command(name)
    except click.ClickException as error:
        echo_error(error)
        sys.exit(error.exit_code)
    command(prog_name=f"sharp-{name}")
