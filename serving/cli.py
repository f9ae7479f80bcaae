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

from sharp.core.cli import SharpCommand, announce, discard_output, echo_error, exit_on_terminate, status
from sharp.core.hub import is_hub_id
from sharp.serving.api.errors import EngineEndedError, InputError, NotFoundError, SharpError
from sharp.serving.client.options import CONNECTION, connection_options
from sharp.serving.server.settings_sources import CONFIG_VARIABLE, GROUPS, SERVER_SETTINGS, read_settings
from sharp.serving.source import EXPORTED_BY, export_flags, export_options, model_folder

if TYPE_CHECKING:  # importing the engine, gRPC and HTTP takes a second, too long for --help
    from sharp.serving.api.events import Delta, Finished
    from sharp.serving.api.request import Prompt
    from sharp.serving.server.server import Started

# The thresholds of Python's garbage collector are raised from (700, 10, 10), so that a body of many lists does not
# trigger collections of older objects. Garbage of requests is collected by time instead: cancelled requests form
# cycles, which also hold native memory.
COLLECTIONS, COLLECTION_SECONDS = (50_000, 50, 100), 10.0
PATH = click.Path(path_type=Path)

NAMES_FLAG = "--served-model-name"
GROUPS_OF_FLAGS = {
    "Checkpoint": EXPORTED_BY,
    **{group: tuple(setting.flag for setting in SERVER_SETTINGS if setting.group == group) for group in GROUPS},
}
GENERATE_GROUPS = {
    "Sampling": ("--max-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--stop", "--ignore-eos"),
    **CONNECTION,
}
COMMON = ("--config", "--help", *(setting.flag for setting in SERVER_SETTINGS if setting.metadata.common))


def settings_as_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for every setting. The value of a flag that is not given is None."""
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
    """The command `sharp serve`, whose flag `--served-model-name A B` takes several values, as in vLLM."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments after joining the names behind `--served-model-name`."""
        return super().parse_args(ctx, joined_names(args))


def joined_names(args: list[str]) -> list[str]:
    """Return the arguments, with all names behind `--served-model-name` joined into one argument.

    If the names are last and no FOLDER came before them, the last of them is FOLDER.
    """
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
    epilog="See also: sharp docs serving, sharp docs reference/settings, sharp doctor.",
)
@click.argument("source", metavar="FOLDER|CHECKPOINT|HUB-ID")
@export_flags
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar=CONFIG_VARIABLE,
    help="TOML file of settings, such as grpc_port = 8001.",
)
@settings_as_options
def serve(source: str, norm: str | None, quantize: str | None, config: Path | None, **flags: Any) -> None:
    """Serve a model over gRPC and OpenAI's HTTP API, with metrics, until SIGTERM or Ctrl-C.

    A model FOLDER of sharp-export is served as it is. A CHECKPOINT (a Hugging Face folder, a .gguf file) or the id of a
    model on the Hugging Face Hub is exported on its first use, into a cache that sharp cache lists.

    The exit code is 70 if the engine failed, or if its GPU was lost, so that a supervisor starts the server again.

    The last line that is printed at start is "sharp-serve: ready grpc=HOST:PORT http=HOST:PORT".

    Every setting can also be given as a variable of the environment, SHARP_GRPC_PORT, or in the file of --config. Flags
    count before the environment, and both before the file.
    """
    exit_on_terminate()
    folder = model_folder(source, export_options(norm, quantize))
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
        # Exit at once, because a runtime whose GPU is lost may abort or wait forever when it is shut down.
        os._exit(ENGINE_ENDED)
    finally:
        log.flush()  # write the log before the error message


def _collect(loop: asyncio.AbstractEventLoop) -> None:
    """Collect garbage now and every `COLLECTION_SECONDS`. A collection takes some milliseconds."""
    gc.collect()
    loop.call_later(COLLECTION_SECONDS, _collect, loop)


def _announce(started: Started) -> None:
    """Print the server's addresses, and exclude the objects loaded by now from garbage collection.

    Raises:
        SharpError: stdout cannot be written.
    """
    from sharp.serving.server.startup import print_startup

    gc.collect()
    # A collection blocks every thread, so the objects that are loaded by now are excluded from collections.
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    _collect(asyncio.get_running_loop())
    try:
        print_startup(started)
        click.echo(f"sharp-serve: ready grpc={started.grpc_address} http={started.http_address}")
    except (OSError, SystemExit) as error:  # rich raises SystemExit if nobody reads stdout
        discard_output()
        reason = getattr(error, "strerror", None) or os.strerror(errno.EPIPE)
        what = f"the server's addresses cannot be written to stdout: {reason}"
        raise SharpError(f"{what}; send stdout to a file, or to /dev/null") from error


@click.command(cls=SharpCommand, groups=GENERATE_GROUPS, epilog="See also: sharp docs serving, sharp serve.")
@click.argument("source", metavar="ADDRESS|FOLDER|CHECKPOINT")
@click.argument("prompt", required=False)
@click.option("--token-ids", help="The prompt as token ids separated by commas, instead of PROMPT.")
@click.option("--model", help="Name of the model.  [default: the server's model]")
@click.option("--max-tokens", default=256, show_default=True, help="Maximum number of tokens to generate.")
@click.option(
    "--temperature",
    type=float,
    help="Temperature; 0 always chooses the most likely token.  [default: the model's, else 1]",
)
@click.option("--top-k", type=int, help="Sample from the k most likely tokens.  [default: the model's, else all]")
@click.option(
    "--top-p",
    type=float,
    help="Sample from the most likely tokens whose probabilities add up to this (top-p).  [default: the model's, else "
    "1]",
)
@click.option("--seed", type=int, help="The same seed samples the same tokens.  [default: random]")
@click.option("--stop", multiple=True, help="Stop before this string; can be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--attention", is_flag=True, help="Show the sharpest and the most dispersed heads, on stderr.")
@connection_options
@click.option(
    "--attempts", type=int, help="How often to call a server that is full or cannot be reached; 1 to 5.  [default: 5]"
)
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

    The model runs on the server at ADDRESS (host:port, of gRPC), or in this process from a model FOLDER or a CHECKPOINT
    (a Hugging Face folder, a .gguf file), which is exported on its first use as by sharp serve.
    """
    from sharp.serving.api.sampling_params import SamplingParams
    from sharp.serving.completion_output import print_event

    sampling = SamplingParams(**{name: value for name, value in params.items() if value is not None})
    prompt_ids_or_text = _prompt(prompt, token_ids)
    with ExitStack() as open_while_read:
        if Path(source).exists():
            if model is not None or any(connection.values()):
                raise InputError(f"{source} is a file or folder; --model, --token and TLS are for a server")
            folder = model_folder(source)
            with status(f"Loading {folder}"):
                from sharp.serving.llm import LLM

                llm = LLM(folder)
            events: Iterator[Delta | Finished] = llm.stream(prompt_ids_or_text, sampling, attention=attention)
        # A host has no slash, but addresses such as dns:///sharp and unix:/sharp do.
        elif ":" not in source.partition("/")[0]:
            raise NotFoundError(
                f"there is no file or folder {source}; give a model folder, a checkpoint, or a server as host:port"
                + (f"; sharp run {source} fetches the model of this name from the Hub" if is_hub_id(source) else "")
            )
        else:
            from sharp.serving.client import Client

            if attempts is not None:
                connection["attempts"] = attempts
            client = open_while_read.enter_context(Client(source, **connection))
            events = client.stream(prompt_ids_or_text, sampling, model=model, attention=attention)
        for event in events:
            print_event(event, as_token_ids=token_ids is not None)


def _prompt(text: str | None, token_ids: str | None) -> Prompt:
    """Return the prompt: `text` ("-" reads stdin), or the ids in `token_ids`, separated by commas.

    Raises:
        InputError: both or neither are given, or an id is no number.
    """
    if (text is None) == (token_ids is None):
        raise InputError("give either PROMPT or --token-ids")
    if token_ids is None:
        return sys.stdin.read() if text == "-" else str(text)
    try:
        return [int(token_id) for token_id in token_ids.split(",")]
    except ValueError as error:
        raise InputError(f"--token-ids is {token_ids!r}; it must be whole numbers, separated by commas") from error
