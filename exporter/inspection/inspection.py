"""The steps of `sharp inspect`: open the model, read the text, run, choose the heads to map."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sharp.core.errors import InputError
from sharp.core.manifest import MANIFEST_FILE
from sharp.exporter.checkpoints.path_checks import INSPECTED as KINDS
from sharp.exporter.checkpoints.path_checks import check_exists
from sharp.exporter.inspection.attention_map import AttentionMap, attention_map
from sharp.exporter.inspection.checkpoint import open_checkpoint
from sharp.exporter.inspection.folder import open_folder
from sharp.exporter.inspection.heads import TokenStatistics, extreme_heads, head_statistics
from sharp.exporter.inspection.prompt import PromptSource, TokenizedText, read_numbers, tokenize
from sharp.exporter.inspection.recording import InspectedModel
from sharp.exporter.programs.reading import ProgramOptions


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection, which the table, the pictures and the page show."""

    model: InspectedModel
    text: TokenizedText
    statistics: TokenStatistics
    maps: tuple[AttentionMap, ...]


def open_model(path: Path, tokenizer: str | None = None, ignore: Sequence[str] = ()) -> InspectedModel:
    """Open the model folder or checkpoint at `path`; `tokenizer` is for a checkpoint that has none.

    `ignore` names unknown keys of the checkpoint to accept.

    Raises:
        NotFoundError: nothing is at `path`.
        InputError: the model cannot be read, is of a kind that has no heads to show, or has a tokenizer already.
    """
    check_exists(path, KINDS)
    if path.is_dir() and not (path / "config.json").exists() and not (path / MANIFEST_FILE).exists():
        raise InputError(f"{path} has neither {MANIFEST_FILE} nor config.json; give {KINDS}")
    if not (path / MANIFEST_FILE).exists():
        return open_checkpoint(path, ProgramOptions(tokenizer=tokenizer), ignore)
    if tokenizer is not None:
        raise InputError(f"--tokenizer is for checkpoints that have none, and {path} is a model folder; leave it out")
    return open_folder(path)


def choose_text(model: InspectedModel, prompt: PromptSource, layer: int | None, head: int | None) -> TokenizedText:
    """Check the choices of the user and return the tokens (numbers, items) to run.

    `layer` and `head` are 0-based, None means no choice; `head` needs a `layer`.

    Raises:
        InputError, NotFoundError: a layer, head, file or token does not exist, or the text is too short or too long.
    """
    for option, value, count in (("--layer", layer, model.layers), ("--head", head, model.q_heads)):
        if value is not None and not 0 <= value < count:
            raise InputError(f"{option} is {value}, but {model.name} has {option[2:]}s 0 to {count - 1}")
    if head is not None and layer is None:
        raise InputError(f"--head is {head} without a layer; give --layer too")
    return tokenize(prompt, model) if model.numbers_of_item is None else read_numbers(prompt, model)


def inspect_text(model: InspectedModel, text: TokenizedText, layer: int | None, head: int | None) -> Inspection:
    """Run `model` over `text`; map one head, or the sharpest and the most dispersed head (of `layer`, if given).

    `text`, `layer` and `head` are those of `choose_text`, which has checked them; the text has at least two tokens.

    Raises:
        InputError: the model is damaged, or of a form that cannot be recorded.
    """
    records = model.record(text.token_ids)
    statistics = head_statistics(records, model.name)
    chosen = extreme_heads(statistics, layer) if layer is None or head is None else [(layer, head)]
    return Inspection(model, text, statistics, tuple(attention_map(records[row], row, part) for row, part in chosen))
