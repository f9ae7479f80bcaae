"""The command `sharp evaluate`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from sharp.core.cli import SharpCommand, exit_on_terminate, if_interrupted
from sharp.core.errors import InputError
from sharp.core.failed_connection import is_url
from sharp.core.table import Table
from sharp.exporter.long_context.subjects import (
    EvaluateSettings,
    Subject,
    check_subjects,
    parse_control,
    settings_record,
)

GROUPS = {
    "Documents": ("--lengths", "--tasks", "--documents", "--text", "--form", "--seed"),
    "Models": ("--compare", "--control", "--device", "--threads"),
    "Output": ("--output", "--quiet"),
}


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parse a list of numbers of tokens, such as 512,1k,2k, where k is 1,024; repetitions are left out.

    Raises:
        InputError: the text is no such list.
    """
    found = []
    for part in text.split(","):
        number = re.fullmatch(r"(\d{1,7})(k?)", part.strip().lower())
        if number is None:
            raise InputError(f"--lengths is {text!r}, but must be numbers of tokens, as 512,1k,2k")
        found.append(int(number[1]) * (1024 if number[2] else 1))
    return tuple(dict.fromkeys(found))


@click.command(
    "evaluate", cls=SharpCommand, groups=GROUPS, epilog="See also: sharp docs evaluate, sharp adapt, sharp inspect."
)
@click.argument("models", metavar="MODEL", nargs=-1, required=True)
@click.option("--lengths", default="512,1k,2k,4k", show_default=True, help="Tokens of the documents; k is 1,024.")
@click.option("--tasks", default="retrieval,tracking,counting,copy", show_default=True, help="Kinds of questions.")
@click.option("--documents", type=int, default=24, show_default=True, help="Number of documents per length.")
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE|FOLDER",
    help="Text around the facts; only the part that sharp adapt does not train on is used; repeatable.  "
    "[default: the documentation in Python's standard library]",
)
@click.option(
    "--form",
    type=click.Choice(["auto", "chat", "plain"]),
    default="auto",
    show_default=True,
    help="Form of the questions. auto: the chat form where the model has a template; servers get the plain form.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the documents.")
@click.option(
    "--compare", is_flag=True, help="Put several MODELs into one page; the others are compared with the first."
)
@click.option(
    "--control",
    "controls",
    multiple=True,
    metavar="KIND=NUMBER",
    help="A variant of the first MODEL without training: temperature=FACTOR of the logits, log-n=TOKENS beyond which "
    "logits grow, or yarn=FACTOR of the context; repeatable.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device for checkpoints.",
)
@click.option("--threads", type=int, default=0, help="CPU threads.  [default: all]")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder for the page and its figures.  [default: <model name>-evaluation]",
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def evaluate(
    models: tuple[str, ...],
    lengths: str,
    tasks: str,
    compare: bool,
    controls: tuple[str, ...],
    output: Path | None,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Measure how well a language model finds facts in long documents, by the length of the document.

    MODEL is a Hugging Face folder, a .gguf file, a folder of sharp-export, or the URL of an OpenAI-compatible server.
    An interrupted run goes on when the same command is typed again; more models, lengths or documents are added to
    the results in the folder.
    """
    exit_on_terminate()
    if len(models) > 1 and not compare:
        raise InputError(f"{len(models)} models are given; put them into one page with --compare, or give one")
    chosen_tasks = tuple(task.strip() for task in tasks.split(",") if task.strip())
    settings = EvaluateSettings(lengths=parse_lengths(lengths), tasks=chosen_tasks, **chosen)
    subjects = [Subject(source) for source in models]
    subjects[1:1] = [Subject(models[0], parse_control(control)) for control in controls]
    check_subjects(subjects, settings)
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(SpinnerColumn(), *columns, console=console, disable=not console.is_terminal) as bars:
        starting = bars.add_task("Loading PyTorch", total=None)
        from sharp.exporter.long_context.evaluate import evaluate as run
        from sharp.exporter.long_context.report import FIGURES, PAGE, summarize, tables, write_report

        bars.remove_task(starting)
        first = (
            re.sub(r"[^\w.-]+", "-", models[0].partition("://")[2])
            if is_url(models[0])
            else Path(models[0]).resolve().name
        )
        folder = output or Path(f"{first.removesuffix('.gguf')}-evaluation")

        if_interrupted(f"the documents that were read are kept in {folder}; the same command goes on from there")

        def phase(name: str, steps: int) -> Callable[[], None]:
            """Begin a progress bar of `steps` documents, and return the function to call after each."""
            task = bars.add_task(name, total=steps)
            done = 0

            def advance() -> None:
                """Count one document."""
                nonlocal done
                done += 1
                bars.advance(task)
                if not console.is_terminal:
                    console.print(f"{name}: {done} of {steps} documents", highlight=False)

            return advance

        lines = run(subjects, settings, folder, phase, lambda said: bars.console.print(said, highlight=False))
        if not lines:
            raise InputError("no model can read documents of these lengths; choose shorter ones with --lengths")
        from sharp.exporter.adapt.text import PYTHON_TEXT

        text = ", ".join(path.name for path in settings.text) or PYTHON_TEXT
        figures = {"settings": settings_record(settings), "text": text, **summarize(lines)}
        write_report(figures, folder)
    if quiet:
        return
    out = Console(highlight=False)
    for found in tables(figures):
        out.print(f"\n{found['title']}", markup=False, soft_wrap=True)
        table = Table()
        for column in found["columns"]:
            table.add_column(column)
        for row in found["rows"]:
            table.add_row(*row)
        out.print(table)
    out.print(f"The page is {folder / PAGE}, its figures are in {folder / FIGURES}.", soft_wrap=True, markup=False)
