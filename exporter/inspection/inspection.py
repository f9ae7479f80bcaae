"""`sharp inspect`, step by step: open, read the text, run, choose the heads to look at."""

from dataclasses import dataclass
from pathlib import Path

from sharp.exporter.checkpoints.path_checks import check_exists
from sharp.exporter.inspection.attention_map import AttentionMap, attention_map
from sharp.exporter.inspection.checkpoint import open_checkpoint
from sharp.exporter.inspection.folder import open_folder
from sharp.exporter.inspection.heads import HeadStatistics, extreme_heads, head_statistics
from sharp.exporter.inspection.numbers import read_numbers
from sharp.exporter.inspection.prompt import Prompt, TokenizedText, tokenize
from sharp.exporter.inspection.recording import InspectedModel
from sharp.exporter.programs.reading import ProgramOptions
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import MANIFEST_FILE

KINDS = (
    "a model folder (of sharp-export), a .pt or .safetensors file of Sharp's own, a .pt2 file of torch.export.save, a "
    "Hugging Face folder or a .gguf file"
)


@dataclass(frozen=True)
class Inspection:
    """What the table, the pictures and the page show."""

    model: InspectedModel
    text: TokenizedText
    statistics: HeadStatistics
    maps: tuple[AttentionMap, ...]


def open_model(path: Path, tokenizer: str | None = None) -> InspectedModel:
    """The model folder or checkpoint at `path`; `tokenizer` is that of a program (`.pt2`), which has none itself.

    Raises:
        NotFoundError: nothing is there.
        InputError: it cannot be read, or is of a kind that has no heads to show, or has a tokenizer already.
    """
    check_exists(path, KINDS)
    if path.is_dir() and not (path / "config.json").exists() and not (path / MANIFEST_FILE).exists():
        raise InputError(f"{path} has neither {MANIFEST_FILE} nor config.json; give {KINDS}")
    given = ProgramOptions(tokenizer=tokenizer)
    if path.suffix != ".pt2":
        given.check_unused(path)
    return open_folder(path) if (path / MANIFEST_FILE).exists() else open_checkpoint(path, given)


def choose_text(model: InspectedModel, prompt: Prompt, layer: int | None, head: int | None) -> TokenizedText:
    """The tokens to run, after a check of everything that the user chose.

    Raises:
        InputError, NotFoundError: there is no such layer, head, file or token, or the text is too short or too long.
    """
    for option, value, count in (("--layer", layer, model.layers), ("--head", head, model.q_heads)):
        if value is not None and not 0 <= value < count:
            raise InputError(f"{option} is {value}, but {model.name} has {option[2:]}s 0 to {count - 1}")
    if head is not None and layer is None:
        raise InputError(f"--head is {head} without a layer; give --layer too")
    return tokenize(prompt, model) if model.numbers_of_item is None else read_numbers(prompt, model)


def inspect_text(model: InspectedModel, text: TokenizedText, layer: int | None, head: int | None) -> Inspection:
    """Run `model` over `text`; map one head, or the sharpest and the most dispersed (of `layer`, if it is given).

    Raises:
        InputError: the model is damaged.
    """
    records = model.record(text.token_ids)
    statistics = head_statistics(records, model.name)
    chosen = extreme_heads(statistics, layer) if layer is None or head is None else [(layer, head)]
    return Inspection(model, text, statistics, tuple(attention_map(records[row], row, one) for row, one in chosen))
