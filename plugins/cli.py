"""The `sharp` command, and how every command of Sharp reports an error."""

import errno
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any

import click

from sharp.plugins.errors import SharpError, VerificationError

COMMANDS = {
    "export": "sharp.exporter.cli:export",
    "generate": "sharp.serving.cli:generate",
    "serve": "sharp.serving.cli:serve",
}


class Refusal(click.ClickException):
    """Input that cannot be used."""

    exit_code = 2


class FailedVerification(click.ClickException):
    """A result that is wrong."""

    exit_code = 1


class SharpCommand(click.Command):
    """A command whose `SharpError`s end as one sentence on stderr and exit code 2 (1 for a failed verification)."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except SharpError as error:
            kind = FailedVerification if isinstance(error, VerificationError) else Refusal
            raise kind(str(error)) from error
        except OSError as error:  # a path that cannot be read or written: no permission, too long a name, a full disk
            if error.errno == errno.EPIPE:  # click ends quietly when nobody reads the output
                raise
            raise Refusal(str(error)) from error


def exit_on_terminate() -> None:
    """Make SIGTERM and SIGHUP unwind the stack like Ctrl-C does, so that nothing half-written stays behind."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, leave)


class LazyGroup(click.Group):
    """Serving needs no torch and exporting no gRPC, so neither is imported for the other's command."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """The names of the subcommands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported now; a missing extra is said in one sentence."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        try:
            command: click.Command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            extra = "export" if module.startswith("sharp.exporter") else "serve"
            ctx.fail(f"{error.name} is not installed; install it with: pip install 'sharp-attention[{extra}]'")
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sharp-attention", prog_name="sharp")
def main() -> None:
    """Export, serve and measure transformers whose attention stays sharp."""
