"""The commands `sharp serve` (also `sharp-serve`) and `sharp generate`."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sharp.plugins.cli import SharpCommand, announce, discard_output, echo_error, status
from sharp.serving.api.errors import EngineEndedError, InputError, NotFoundError, SharpError
from sharp.serving.client.options import CONNECTION, connection_options
from sharp.serving.server.settings_sources import CONFIG_VARIABLE, GROUPS, SERVER_SETTINGS, read_settings

if TYPE_CHECKING:  # the engine, gRPC and HTTP take a second to import: not for --help or a typing error
    from sharp.serving.api.events import Delta, Finished
    from sharp.serving.api.request import Prompt
    from sharp.serving.server.server import Started

# Python's garbage collector: a body of many lists makes it look at no older objects, by default (700, 10, 10). What
# requests leave behind is collected by time instead: cancelled ones are cycles, which hold native memory, too.
COLLECTIONS, COLLECTION_SECONDS = (50_000, 50, 100), 10.0
PATH = click.Path(path_type=Path)

NAMES_FLAG = "--served-model-name"
GROUPS_OF_FLAGS = {group: tuple(one.flag for one in SERVER_SETTINGS if one.group == group) for group in GROUPS}
GENERATE_GROUPS = {
    "Sampling": ("--max-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--stop", "--ignore-eos"),
    **CONNECTION,
}
COMMON = ("--config", "--help", *(one.flag for one in SERVER_SETTINGS if one.metadata.common))


def settings_as_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for every setting; one that is not given is None."""
    for setting in reversed(SERVER_SETTINGS):
        flag = f"{setting.flag}/--no-{setting.flag[2:]}" if setting.type is bool else setting.flag
        kind = PATH if setting.type is Path else setting.type
        choices = f" One of: {', '.join(setting.metadata.choices)}." if setting.metadata.choices else ""
        default = f"  [default: {setting.default_text}]" if setting.default_text else ""
        text = f"{setting.metadata.help}{choices}{default}"
        flags = (flag, *setting.metadata.aliases)
        command = click.option(*flags, setting.name, default=None, type=kind, help=text)(command)
    return command


class ServeCommand(SharpCommand):
    """`--served-model-name A B` has several values, as in vLLM."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        return super().parse_args(ctx, joined_names(args))


def joined_names(args: list[str]) -> list[str]:
    """The arguments with all names behind `--served-model-name` in one; the last is FOLDER where none came before."""
    if NAMES_FLAG not in args:
        return args
    start = args.index(NAMES_FLAG) + 1
    end = next((index for index in range(start, len(args)) if args[index].startswith("-")), len(args))
    if end == len(args) and end - start > 1 and args[0].startswith("-"):
        end -= 1
    return [*args[:start], ",".join(args[start:end]), *args[end:]] if end > start else args


@click.command(
    cls=ServeCommand,
    groups=GROUPS_OF_FLAGS,
    common=COMMON,
    epilog="See also: docs/serving.md, docs/reference/settings.md, sharp doctor.",
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--config", type=click.Path(path_type=Path), envvar=CONFIG_VARIABLE, help="TOML file of settings, as grpc_port = 1."
)
@settings_as_options
def serve(folder: Path, config: Path | None, **flags: Any) -> None:
    """Serve the model FOLDER over gRPC and OpenAI's HTTP API, with metrics, until SIGTERM or Ctrl-C.

    The exit code is 70 if the engine ended by a defect or with its GPU, so that a supervisor starts the server again.

    The last line that is printed at start is "sharp-serve: ready grpc=HOST:PORT http=HOST:PORT".

    Every setting can also be given as a variable of the environment, SHARP_GRPC_PORT, or in the file of --config. Flags
    count before the environment, and both before the file.
    """
    announce(f"Loading {folder}")
    from sharp.serving.observability.request_log import set_up_logging
    from sharp.serving.server.server import ENGINE_ENDED, run_server

    set_up_logging("text")
    settings = read_settings({name: value for name, value in flags.items() if value is not None}, config)
    log = set_up_logging(settings.server.log_format)
    try:
        asyncio.run(run_server(folder, settings, _announce))
    except EngineEndedError as error:
        log.flush()
        echo_error(str(error))
        sys.stdout.flush()
        os._exit(ENGINE_ENDED)  # a runtime whose GPU is lost may abort or wait for ever when it is taken down
    finally:
        log.flush()  # before the sentence of an error


def _collect(loop: asyncio.AbstractEventLoop) -> None:
    """Collect garbage now and every `COLLECTION_SECONDS`: some milliseconds."""
    gc.collect()
    loop.call_later(COLLECTION_SECONDS, _collect, loop)


def _announce(started: Started) -> None:
    from sharp.serving.server.startup import print_startup

    gc.collect()
    gc.freeze()  # a collection holds up every thread: what was loaded is left out from now on
    gc.set_threshold(*COLLECTIONS)
    _collect(asyncio.get_running_loop())
    try:
        print_startup(started)
        click.echo(f"sharp-serve: ready grpc={started.grpc_address} http={started.http_address}")
    except (OSError, SystemExit) as error:  # the latter is rich's way to end where nobody reads
        discard_output()
        reason = getattr(error, "strerror", None) or os.strerror(errno.EPIPE)
        what = f"the server's addresses cannot be written to stdout: {reason}"
        raise SharpError(f"{what}; send stdout to a file, or to /dev/null") from error


@click.command(cls=SharpCommand, groups=GENERATE_GROUPS, epilog="See also: docs/serving.md, sharp serve.")
@click.argument("source", metavar="ADDRESS|FOLDER")
@click.argument("prompt", required=False)
@click.option("--token-ids", help="The prompt as token ids, separated by commas, in place of PROMPT.")
@click.option("--model", help="Name of the model.  [default: the one that is served]")
@click.option("--max-tokens", default=256, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", type=float, help="0 takes the most likely token.  [default: the model's, else 1]")
@click.option("--top-k", type=int, help="Sample from the k most likely tokens.  [default: the model's, else all]")
@click.option(
    "--top-p",
    type=float,
    help="Sample from the most likely tokens that reach this share.  [default: the model's, else 1]",
)
@click.option("--seed", type=int, help="The same seed samples the same tokens.  [default: random]")
@click.option("--stop", multiple=True, help="End before this string; can be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--attention", is_flag=True, help="Show the sharpest and the most dispersed heads, on stderr.")
@connection_options
@click.option("--attempts", type=int, help="Calls when the server is full or away; 1 to 5.  [default: 5]")
def generate(
    source: str,
    prompt: str | None,
    token_ids: str | None,
    model: str | None,
    attention: bool,
    connection: dict[str, Any],
    attempts: int | None,
    **params: Any,
) -> None:
    """Generate from PROMPT ("-": read it from stdin) and print the text as it comes.

    On the server at ADDRESS (host:port), or in this process from a model FOLDER.
    """
    from sharp.serving.api.sampling_params import SamplingParams
    from sharp.serving.completion_output import print_event

    sampling = SamplingParams(**{name: value for name, value in params.items() if value is not None})
    prompt_ids_or_text = _prompt(prompt, token_ids)
    with ExitStack() as open_while_read:
        if Path(source).is_dir():
            if model is not None or any(connection.values()):
                raise InputError(f"{source} is a folder; --model, --token and TLS are for a server")
            with status(f"Loading {source}"):
                from sharp.serving.llm import LLM

                llm = LLM(source)
            events: Iterator[Delta | Finished] = llm.stream(prompt_ids_or_text, sampling, attention=attention)
        elif "/" in source and ":" not in source.partition("/")[0]:  # no host has one; dns:///sharp and unix:/sharp do
            raise NotFoundError(f"there is no folder {source}; give a model folder, or a server as host:port")
        else:
            from sharp.serving.client import Client

            if attempts is not None:
                connection["attempts"] = attempts
            client = open_while_read.enter_context(Client(source, **connection))
            events = client.stream(prompt_ids_or_text, sampling, model=model, attention=attention)
        for event in events:
            print_event(event, as_token_ids=token_ids is not None)


def _prompt(text: str | None, token_ids: str | None) -> Prompt:
    if (text is None) == (token_ids is None):
        raise InputError("give either PROMPT or --token-ids")
    if token_ids is None:
        return sys.stdin.read() if text == "-" else str(text)
    try:
        return [int(token_id) for token_id in token_ids.split(",")]
    except ValueError as error:
        raise InputError(f"--token-ids is {token_ids!r}; it must be whole numbers, separated by commas") from error
