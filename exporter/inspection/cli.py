"""The command `sharp inspect`."""

from pathlib import Path

import click
from rich.console import Console

from sharp.core.cli import SharpCommand, if_interrupted
from sharp.core.errors import InputError
from sharp.exporter.checkpoints.path_checks import INSPECTED, check_exists, check_fits
from sharp.exporter.ignore_key import ignore_key_option


@click.command(
    "inspect", cls=SharpCommand, epilog="See also: sharp docs inspect, sharp docs tutorials/dispersed-heads."
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--text", "file", type=click.Path(path_type=Path), metavar="FILE", help="The text to read, in UTF-8.")
@click.option("--prompt", metavar="STRING", help="The text itself, in place of --text.")
@click.option("--token-ids", metavar="IDS", help="The text as token ids, separated by commas, in place of --text.")
@click.option(
    "--numbers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The input of a model of numbers or of sets, as JSON: a list of numbers, or a list of items that are lists.  "
    "[default: random]",
)
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    help="Read only the first N tokens, numbers or items.  [default: all; without an input, 512 generated ones]",
)
@click.option(
    "--tokenizer",
    metavar="FILE",
    help="The tokenizer of a checkpoint without one (.pt2): a tokenizer.json, a folder with one, or bytes.",
)
@ignore_key_option
@click.option(
    "--layer",
    type=int,
    metavar="L",
    help="Show maps of the heads of this layer, counted from 0.  [default: all layers]",
)
@click.option(
    "--head",
    type=int,
    metavar="H",
    help="Show the map of this head of --layer.  [default: the sharpest and the most dispersed]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder for the page and the pictures; files of an earlier inspection are replaced.  [default: <model "
    "name>-inspect]",
)
def inspect(
    model: Path,
    file: Path | None,
    prompt: str | None,
    token_ids: str | None,
    numbers: Path | None,
    max_tokens: int | None,
    tokenizer: str | None,
    ignore_keys: tuple[str, ...],
    layer: int | None,
    head: int | None,
    output: Path | None,
) -> None:
    """Show what every attention head of MODEL does with a text: as a table, as pictures and as one HTML page.

    MODEL is a model folder of sharp-export, a .pt or .safetensors file of Sharp's own, a .pt2 file of
    torch.export.save, a Hugging Face folder or a .gguf file. Without a text, the model has to find the largest of many
    numbers, as in Figure 3 of the paper on adaptive temperature. For a model of sets, the page shows its head for the
    first n items of the set, for every n.
    """
    from sharp.exporter.inspection.prompt import PromptSource

    if_interrupted("nothing was written")
    check_exists(model, INSPECTED)
    check_fits(model)
    source = PromptSource(file, prompt, None if token_ids is None else parse_ids(token_ids), max_tokens, numbers)
    # Importing torch, onnx and matplotlib takes seconds, which --help and wrong options should not.
    from sharp.exporter.inspection.inspection import choose_text, inspect_text, open_model
    from sharp.exporter.inspection.page import write_page
    from sharp.exporter.inspection.pictures import draw_pictures
    from sharp.exporter.inspection.table import heads_table
    from sharp.exporter.programs.time_limit import time_of_program

    progress = Console(stderr=True)
    with progress.status("Reading the model") as status, time_of_program(model):
        opened = open_model(model, tokenizer, ignore_keys)
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
    """Parse whole numbers separated by commas, such as "1, 2, 3".

    Raises:
        InputError: the text contains something else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--token-ids is {text!r}; it must be whole numbers, separated by commas") from error


def make_folder(folder: Path) -> None:
    """Make the output folder before the long work; it may exist already.

    Raises:
        InputError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the output folder {folder} cannot be made: {error.strerror}; choose another with -o"
        ) from error
