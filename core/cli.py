"""The `sharp` command, and the reports of errors and progress that every command of Sharp makes."""

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

from sharp.core.errors import SharpError, VerificationError, is_panic
from sharp.core.grouped_help import ALL, COMMON, HELP, GroupedCommand, help_option, with_version
from sharp.core.output_file import room

if TYPE_CHECKING:  # importing rich takes as long as all other imports of `sharp -h`
    from rich.status import Status


class Lazy(NamedTuple):
    """A subcommand: its module and attribute, the extra that installs its imports, and its line in the list."""

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
            "Fit a length scale to a softmax model.",
        ),
        "check-normalizer": Lazy(
            "sharp.plugins.custom.cli:check_normalizer", "export", "Test a normalizer of your own, a Python file."
        ),
        "build": Lazy(
            "sharp.exporter.build:build", "export,tensorrt-rtx", "Build an engine for TensorRT or TensorRT-RTX."
        ),
    },
    "Run it": {
        "serve": Lazy("sharp.serving.cli:serve", "serve", "Serve a model over gRPC and OpenAI's HTTP API."),
        "run": Lazy("sharp.serving.run_cli:run", "serve", "Chat with a model in the terminal."),
        "generate": Lazy("sharp.serving.cli:generate", "serve", "Generate text with a server or a model folder."),
        "health": Lazy(
            "sharp.serving.server.health_check:health", "serve", "Check the health of the server on this machine."
        ),
    },
    "Inspect and measure": {
        "evaluate": Lazy(
            "sharp.exporter.long_context.cli:evaluate",
            "adapt,serve",
            "Measure how well a model finds facts in long documents.",
        ),
        "compare": Lazy(
            "sharp.serving.compare.cli:compare", "serve", "Compare a model folder with a second reader of its model."
        ),
        "inspect": Lazy(
            "sharp.exporter.inspection.cli:inspect", "export", "Show the attention of every head for a text."
        ),
        "baseline": Lazy(
            "sharp.serving.observability.cli:baseline", "serve", "Record how the heads' entropies are distributed."
        ),
        "bench": Lazy(
            "sharp.serving.bench.cli:bench", "serve", "Measure a server under load, or the speed of decoding."
        ),
    },
    "Machines": {
        "doctor": Lazy("sharp.plugins.doctor.cli:doctor", "serve", "Check attention on every backend of this machine."),
        "cache": Lazy("sharp.core.cache_cli:cache", "serve", "List and remove models exported on first use."),
        "plan": Lazy(
            "sharp.serving.capacity.cli:plan",
            "serve",
            "Estimate the memory, the servers and the cost that a load needs.",
        ),
    },
    "Read": {
        "docs": Lazy("sharp.core.docs_cli:docs", "serve", "Show the documents: how-tos, references, troubleshooting."),
    },
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}
INTERRUPTED = 128 + signal.SIGINT  # the exit code after Ctrl-C
KEPT = "sharp.kept"  # key in click's context: the sentence of `if_interrupted`


class Refusal(click.ClickException):
    """An error for input that cannot be used; the exit code is 2."""

    exit_code = 2


class FailedVerification(click.ClickException):
    """An error for a result that is wrong; the exit code is 1."""

    exit_code = 1


def discard_output() -> None:
    """Discard all further output to stdout after a write has failed, or Python would fail again when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def echo_error(error: click.ClickException | str) -> None:
    """Print an error on stderr, as click does, with the word "Error:" in red on a terminal; a text becomes an error."""
    shown = StringIO()
    (click.ClickException(error) if isinstance(error, str) else error).show(shown)
    usage, mark, sentence = shown.getvalue().partition("Error:")
    click.echo(usage + click.style(mark, fg="red", bold=True) + sentence, err=True, nl=False, color=colour())


def colour() -> bool | None:
    """Return click's argument `color`: None (colour on terminals only), or False if NO_COLOR is set or TERM is dumb."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def if_interrupted(text: str) -> None:
    """Set what the running command says after Ctrl-C: what of its work is kept, and how to go on."""
    click.get_current_context().meta[KEPT] = text


def status(text: str) -> AbstractContextManager[Status]:
    """Return a context that shows `text` with a spinner on stderr until its end; nothing if stderr is no terminal."""
    from rich.console import Console
    from rich.markup import escape

    return Console(stderr=True).status(escape(text))


def announce(text: str) -> None:
    """Print `text` as a line on stderr, below which log lines may follow; nothing if stderr is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        console.print(text, soft_wrap=True, markup=False, highlight=False)


class _Main(click.Command):
    """A command whose errors are in colour on a terminal, including a failure to print help."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command like `click.Command.main`, and print errors in colour.

        In standalone mode (the default) this ends the process: with exit code 130 after Ctrl-C, 2 after an `OSError`,
        otherwise with the command's or the error's own code. In other modes, errors are raised.
        """
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
                echo_error(f"{error}{room(error)}")
            sys.exit(Refusal.exit_code)


class SharpCommand(_Main, GroupedCommand):
    """A command whose `SharpError`s end as one sentence on stderr and exit code 2 (1 for a failed verification)."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn its errors into one sentence.

        Raises:
            click.ClickException: `FailedVerification` (exit code 1) for a `VerificationError`; `Refusal` (exit code 2)
                for other `SharpError`s, missing packages, errors of the system, too little memory and panics.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)  # ends the line in which the terminal wrote ^C
            if KEPT in ctx.meta:
                click.echo(f"Interrupted: {ctx.meta[KEPT]}", err=True)
            ctx.exit(INTERRUPTED)
        except SharpError as error:
            kind = FailedVerification if isinstance(error, VerificationError) else Refusal
            raise kind(str(error)) from error
        except ModuleNotFoundError as error:
            raise missing_extra(str(self.name), error) from error
        except ImportError as error:
            raise broken_package(error) from error
        except OSError as error:  # such as no permission, too long a name, a full disk
            if error.errno == errno.EPIPE:  # click itself ends quietly when the output's reader is gone
                raise
            if error.errno == errno.ENOSPC:
                discard_output()  # stdout may be the file that is full
            raise Refusal(f"{error}{room(error)}") from error
        except BaseException as error:
            if isinstance(error, MemoryError) or "can't start new thread" in str(error):
                raise Refusal("there is not enough memory; see also ulimit -v and ulimit -u") from error
            if is_panic(error):
                raise Refusal(
                    f"a library failed: {error}; please open an issue with the command and this message"
                ) from error
            raise


def exit_on_terminate() -> None:
    """Make SIGTERM and SIGHUP raise `SystemExit` in the main thread, so that no incomplete file is left behind.

    The exit code is 128 + the signal's number. A signal that is ignored (SIGHUP under nohup) stays ignored.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        """Exit with 128 plus the signal's number, as shells report signals."""
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, which must stay so
            signal.signal(number, leave)


class SharpGroup(_Main, click.Group):
    """A group of commands: `help COMMAND` is `COMMAND --help`, and `--help=all` shows the help of all commands."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        attributes["context_settings"] = HELP | (attributes.get("context_settings") or {})
        super().__init__(*arguments, **attributes)
        text = "Show this message, or the help of all commands, and exit."
        self._help_of_all = help_option((COMMON, ALL), text, "[all]")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; `help COMMAND` is read as `COMMAND --help`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        names = HELP["help_option_names"]
        return super().parse_args(ctx, [f"--help={COMMON}", *args[1:]] if args and args[0] in names else args)

    def get_help_option(self, _ctx: click.Context) -> click.Option | None:
        """Return the option `--help`, which takes the word all."""
        return self._help_of_all

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters of the group with `--version` and `--help`."""
        return with_version(super().get_params(ctx))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand.

        Raises:
            click.UsageError: there is no such subcommand; the message suggests a close name, if there is one.
        """
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = get_close_matches(args[0], self.list_commands(ctx), 1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from error


class LazyGroup(SharpGroup):
    """A group that imports only the subcommand that runs, as serving needs no torch and exporting no gRPC."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the names of the subcommands."""
        return sorted(COMMANDS)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of subcommands without importing any of them."""
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, command.summary) for name, command in commands.items()])

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand and return it; None if there is none of this name.

        Raises:
            click.ClickException: the subcommand cannot be imported, as when a package is not installed.
        """
        return load_command(cmd_name) if cmd_name in COMMANDS else None


def load_command(name: str) -> click.Command:
    """Import the subcommand `name`, a key of `COMMANDS`, and return it.

    Raises:
        click.ClickException: a package is not installed, and the message names the extra that installs it; or the
            subcommand cannot be imported.
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
    """Return the error for the subcommand `name`, whose libraries are not installed; names the extra to install.

    The extra is `dev` if `name` is no subcommand of `sharp`.
    """
    extra = COMMANDS[name].extra if name in COMMANDS else "dev"
    return Refusal(f"{error.name} is not installed; install it with: pip install 'sharp-attention[{extra}]'")


def broken_package(error: ImportError) -> Refusal:
    """Return the error for a package that is installed but lacks a library that it needs."""
    return Refusal(f"{error.name or 'a package'} is installed but cannot be imported: {error}")


@click.group(cls=LazyGroup, epilog="See also: sharp docs, sharp help COMMAND.")
def main() -> None:
    """Export, serve and measure transformers whose attention stays sharp."""


def export_main() -> None:
    """Run the `sharp-export` script."""
    run_script("export")


def serve_main() -> None:
    """Run the `sharp-serve` script."""
    run_script("serve")


def run_script(name: str) -> None:
    """Run the subcommand `name`, a key of `COMMANDS`, as the script `sharp-<name>`, which ends the process."""
    try:
        command = load_command(name)
    except click.ClickException as error:
        echo_error(error)
        sys.exit(error.exit_code)
    command(prog_name=f"sharp-{name}")
