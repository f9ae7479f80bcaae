"""The command `sharp inspect`."""

from pathlib import Path

import click
from rich.console import Console

from sharp.plugins.cli import SharpCommand
from sharp.plugins.errors import InputError


@click.command("inspect", cls=SharpCommand, epilog="See also: docs/inspect.md, docs/tutorials/dispersed-heads.md.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--text", "file", type=click.Path(path_type=Path), metavar="FILE", help="The text to read, in UTF-8.")
@click.option("--prompt", metavar="STRING", help="The text itself, in place of --text.")
@click.option("--token-ids", metavar="IDS", help="The text as token ids, separated by commas, in place of --text.")
@click.option(
    "--numbers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What a model of numbers or of sets reads: JSON, a list of numbers, or of items as lists.  [default: random]",
)
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    help="Read only the first N tokens, numbers or items.  [default: all; 512 of what is made where nothing is given]",
)
@click.option(
    "--tokenizer",
    metavar="FILE",
    help="Of a .pt2 program, which has none itself: a tokenizer.json, a folder with one, or bytes.",
)
@click.option("--layer", type=int, metavar="L", help="Map heads of this layer, the first is 0.  [default: of all]")
@click.option(
    "--head", type=int, metavar="H", help="Map this head of --layer.  [default: the sharpest and the most dispersed]"
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where page and pictures go; files of an earlier inspection are replaced.  [default: <model name>-inspect]",
)
def inspect(
    model: Path,
    file: Path | None,
    prompt: str | None,
    token_ids: str | None,
    numbers: Path | None,
    max_tokens: int | None,
    tokenizer: str | None,
    layer: int | None,
    head: int | None,
    output: Path | None,
) -> None:
    """Show what every attention head of MODEL does with a text: as a table, as pictures and as one HTML page.

    MODEL is a model folder of sharp-export, a .pt or .safetensors file of Sharp's own, a .pt2 file of
    torch.export.save, a Hugging Face folder or a .gguf file. Without a text, the model has to find the largest of many
    numbers, as in Figure 3 of the paper on adaptive temperature. Of a model of sets its head is shown for the sets of
    the first n items, for every n.
    """
    from sharp.exporter.inspection.prompt import Prompt

    source = Prompt(file, prompt, None if token_ids is None else parse_ids(token_ids), max_tokens, numbers)
    # torch, onnx and matplotlib take seconds to import: not for --help or a typing error
    from sharp.exporter.inspection.inspection import choose_text, inspect_text, open_model
    from sharp.exporter.inspection.page import write_page
    from sharp.exporter.inspection.pictures import draw_pictures
    from sharp.exporter.inspection.table import heads_table
    from sharp.exporter.programs.time_limit import time_of_program

    progress = Console(stderr=True)
    with progress.status("Reading the model") as status, time_of_program(model):
        opened = open_model(model, tokenizer)
        folder = output or Path(f"{opened.name}-inspect")
        chosen = choose_text(opened, source, layer, head)
        make_folder(folder)
        status.update(f"Running {len(chosen.token_ids)} {opened.unit}s through {opened.name}")
        inspection = inspect_text(opened, chosen, layer, head)
        status.update("Drawing")
        written = [write_page(inspection, folder), *draw_pictures(inspection, folder)]
    console = Console(highlight=False)
    console.print(
        f"{opened.name}: norm {opened.norm}, {opened.layers} layers of {opened.q_heads} heads; "
        f"{len(inspection.text.token_ids)} {opened.unit}s: {inspection.text.described}",
        soft_wrap=True,
        markup=False,
    )
    console.print(heads_table(inspection.statistics, opened.norm == "adaptive-temperature"))
    console.print(f"All heads, curves and maps: {written[0]}", soft_wrap=True, markup=False)
    console.print(f"Pictures: {', '.join(str(path) for path in written[1:])}", soft_wrap=True, markup=False)


def parse_ids(text: str) -> tuple[int, ...]:
    """The numbers in "1, 2, 3".

    Raises:
        InputError: something else is there.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--token-ids is {text!r}; it must be whole numbers, separated by commas") from error


def make_folder(folder: Path) -> None:
    """Make the output folder before the long work.

    Raises:
        InputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the output folder {folder} cannot be made: {error.strerror}; choose another with -o"
        ) from error
