"""The `sharp` command, and how every command of Sharp reports an error."""

import errno
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any

import click

from sharp.plugins.errors import SharpError, VerificationError

# Name of a subcommand -> where it is, and the extra of the package that brings what it imports.
COMMANDS = {
    "baseline": ("sharp.serving.baseline:baseline", "serve"),
    "bench": ("sharp.serving.bench.cli:bench", "serve"),
    "build": ("sharp.exporter.build:build", "export,tensorrt-rtx"),
    "doctor": ("sharp.plugins.doctor.cli:doctor", "serve"),
    "export": ("sharp.exporter.cli:export", "export"),
    "fit-temperature": ("sharp.models.fit_temperature:fit_temperature", "export"),
    "generate": ("sharp.serving.cli:generate", "serve"),
    "health": ("sharp.serving.health:health", "serve"),
    "inspect": ("sharp.exporter.inspection.cli:inspect", "export"),
    "plan": ("sharp.serving.capacity.cli:plan", "serve"),
    "serve": ("sharp.serving.cli:serve", "serve"),
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
        except ModuleNotFoundError as error:
            raise missing_extra(str(self.name), error) from error
        except ImportError as error:
            raise broken_package(error) from error
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

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported now."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None


def load_command(name: str) -> click.Command:
    """Import a subcommand.

    Raises:
        click.ClickException: what it imports is not installed, and the message names the extra that brings it; or it
            cannot be imported.
    """
    module, _, attribute = COMMANDS[name][0].partition(":")
    try:
        command: click.Command = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise missing_extra(name, error) from error
    except ImportError as error:
        raise broken_package(error) from error
    return command


def missing_extra(name: str, error: ModuleNotFoundError) -> Refusal:
    """The sentence for a subcommand whose libraries are not installed."""
    _, extra = COMMANDS.get(name, ("", "dev"))
    return Refusal(f"{error.name} is not installed; install it with: pip install 'sharp-attention[{extra}]'")


def broken_package(error: ImportError) -> Refusal:
    """The sentence for a package that is installed and cannot be imported: a library that it needs is missing."""
    return Refusal(f"{error.name or 'a package'} is installed but cannot be imported: {error}")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
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
        error.show()
        sys.exit(error.exit_code)
    command(prog_name=f"sharp-{name}")
