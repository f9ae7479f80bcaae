"""The command `sharp compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sharp.core.cli import SharpCommand, exit_on_terminate, if_interrupted
from sharp.serving.client.options import TOKEN_VARIABLE

if TYPE_CHECKING:  # importing the engine takes a second, too long for --help
    from sharp.serving.compare.comparison import Comparison

DIFFERS = 1  # the exit code if the two differ
GROUPS = {
    "Texts and limits": ("--with", "--text", "--tokens", "--new-tokens", "--tolerance"),
    "Second reader": ("--trust-remote-code", "--model", "--token", "--timeout"),
}


@click.command(cls=SharpCommand, groups=GROUPS, epilog="See also: sharp docs compare, sharp export.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--with",
    "other",
    required=True,
    metavar="URL|GGUF|FOLDER",
    help="A server of the same model (vLLM, llama-server, TGI, sharp-serve); its .gguf file, read "
    "by llama.cpp; or its Hugging Face folder, read by transformers.",
)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A text to compare, as a file; can be given several times.  [default: short texts that tokenizers disagree "
    "about, and Sharp's licence]",
)
@click.option(
    "--tokens",
    type=click.IntRange(2, 2**17),
    default=512,
    show_default=True,
    help="Maximum tokens of a text; longer texts are cut.",
)
@click.option(
    "--new-tokens", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens to generate after a text."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 100, min_open=True),
    help="Mean difference of log-probabilities that is allowed, in nats; a single one may be 20 times as much.  "
    "[default: 0.001 for float32, 0.02 for 16 bits, 0.15 for 8, 0.3 for 4]",
)
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code from the Hugging Face folder, as trust_remote_code of transformers.",
)
@click.option("--model", help="Name of the model on the server.  [default: the first that it lists]")
@click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    help=f"The server's bearer token. The variable {TOKEN_VARIABLE} is safer, because other users can see flags.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, 86400, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds to wait for each response of the server.",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Device for FOLDER."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def compare(folder: Path, other: str, as_json: bool, **options: Any) -> None:
    """Compare the model FOLDER with a second reader of the same model, which shares no code with the export.

    Compared are the tokens of texts, the log-probabilities of their tokens, a greedy continuation and the stop tokens.
    The last line is the verdict. The exit code is 0 if they agree and 1 if they differ.
    """
    from rich.console import Console
    from rich.progress import Progress

    from sharp.serving.compare.compare import CompareSettings
    from sharp.serving.compare.compare import compare as run

    if_interrupted("nothing is kept")
    exit_on_terminate()  # a SIGTERM then also ends the other program's process
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("texts", total=None)

        def on_text(count: int) -> None:
            progress.update(task, total=count, advance=1)

        found = run(folder, other, CompareSettings(**options), on_text)
    if as_json:
        from sharp.serving.compare.output import as_object

        click.echo(json.dumps(as_object(found), ensure_ascii=False, indent=2))
    else:
        _print(found)
    if not found.agrees:
        click.get_current_context().exit(DIFFERS)


def _print(found: Comparison) -> None:
    """Print the comparison on the terminal: a table, the tolerance, what was not compared, and the verdict."""
    from rich.console import Console

    from sharp.serving.compare.output import table
    from sharp.serving.compare.verdict import not_compared, tolerance_line, verdict

    console = Console()
    console.print(table(found))
    click.echo(f"{found.folder} beside {found.other}")
    click.echo(tolerance_line(found))
    for line in not_compared(found):
        click.echo(f"Not compared: {line}")
    click.echo(verdict(found))
