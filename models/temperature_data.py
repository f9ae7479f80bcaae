"""What `sharp fit-temperature` fits to: samples of a task, or windows of a text, and the points that they give."""

from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from sharp.models.bits_per_byte import check_reads_bytes, read_text
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Checkpoint
from sharp.models.evaluation import TEXT, check_outputs, find_task, parse_lengths, sampler_of
from sharp.models.max_retrieval import MaxRetrieval
from sharp.models.objective import Batch
from sharp.models.tasks.scoring import check_memory
from sharp.models.tasks.task import Sampler
from sharp.models.temperature_fit import TEMPERATURES, Points, language_points, max_retrieval_points
from sharp.plugins.errors import InputError

TOKENS_PER_BATCH = 2**17
TEXT_WINDOW = 512


def set_data(
    stored: Checkpoint, model: MaxRetrieval, lengths: str | None, samples: int, parameters: tuple[str, ...], seed: int
) -> tuple[Points, str]:
    """The points of a max-retrieval model on its task, and the words for this data.

    Raises:
        InputError: the model was not trained with softmax, or a length or parameter cannot work.
    """
    check_norm(model.config.norm)
    task = find_task("max-retrieval", stored)
    sampler = sampler_of(task, stored, parameters)
    check_outputs(model, sampler)
    sizes = task.evaluation_lengths if lengths is None else parse_lengths(lengths)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("fitting", total=samples * sum(sizes))

        def batches() -> Iterator[Batch]:
            for batch in draw(sampler, sizes, samples, seed):
                yield batch
                progress.advance(bar, batch.inputs[0].shape[:2].numel())

        points = max_retrieval_points(model, batches())
    return points, f"{sampler}, {samples} samples of each of the lengths {', '.join(map(str, sizes))}, seed {seed}"


def language_data(
    stored: Checkpoint,
    lengths: str | None,
    samples: int,
    parameters: tuple[str, ...],
    text_file: Path | None,
    threshold: float,
    seed: int,
) -> tuple[Points, str]:
    """The points of a language model on a text or on the task that it was trained on, and the words for this data.

    Raises:
        InputError: the model is no language model or was not trained with softmax, or there is nothing to fit it to.
    """
    model = stored.model
    if not isinstance(model, SharpForCausalLM):
        raise InputError(
            f"no best temperature is defined for a {type(model).__name__}, which says no next token; "
            "fit a max-retrieval model or a causal language model"
        )
    check_norm(model.config.norm)
    heads, device = model.config.layers * model.config.q_heads, torch.device("cpu")  # every layer's weights are kept
    if text_file is not None or stored.task in (None, TEXT):
        check_reads_bytes(model)
        if parameters:
            raise InputError("a text has no parameters; leave out --set")
        sizes = (TEXT_WINDOW,) if lengths is None else parse_lengths(lengths)
        for length in sizes:
            check_memory(heads * length * length, length, device)
        tokens = read_text(text_file)
        batches = [batch for length in sizes for batch in windows(tokens, length, samples, seed)]
        data = f"{text_file.name if text_file else 'the held-out handbook'}, {samples} windows of each of the lengths"
    else:
        task = find_task(None, stored)
        sampler = sampler_of(task, stored, parameters)
        check_outputs(model, sampler)
        sizes = task.evaluation_lengths[:2] if lengths is None else parse_lengths(lengths)
        for length in sizes:
            check_memory(heads * sampler.tokens(length) ** 2, length, device)
        batches = [one for batch in draw(sampler, sizes, samples, seed) for one in split(batch)]
        data = f"{sampler}, {samples} samples of each of the lengths"
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("fitting", total=len(batches) * len(TEMPERATURES))
        points = language_points(model, batches, threshold, lambda: progress.advance(bar))
    return points, f"{data} {', '.join(map(str, sizes))}, seed {seed}"


def check_norm(norm: str) -> None:
    """Check that a temperature is what the model's attention lacks.

    Raises:
        InputError: its norm is not softmax.
    """
    if norm not in ("softmax", "adaptive-temperature"):
        raise InputError(f"adaptive temperature is for models that were trained with softmax; this one has norm {norm}")


def draw(sampler: Sampler, lengths: tuple[int, ...], samples: int, seed: int) -> Iterator[Batch]:
    """`samples` samples of every length, in batches that fit into memory.

    Raises:
        InputError: there are no samples of a length.
    """
    for length in lengths:
        sampler.tokens(length)  # a wrong one is refused before the first is drawn
    for length in lengths:
        generator = torch.Generator().manual_seed(seed)
        at_once = max(1, TOKENS_PER_BATCH // sampler.tokens(length))
        for done in range(0, samples, at_once):
            yield sampler.sample(min(at_once, samples - done), length, generator)


def split(batch: Batch) -> Iterator[Batch]:
    """The sequences of a batch of token tasks one by one."""
    for inputs, targets in zip(batch.inputs[0].split(1), batch.targets.split(1), strict=True):
        yield Batch((inputs,), targets)


def windows(tokens: Tensor, length: int, samples: int, seed: int) -> Iterator[Batch]:
    """Windows of `length` at random places of `tokens` [tokens].

    Raises:
        InputError: the text is too short.
    """
    if not 1 <= length < len(tokens):
        raise InputError(f"windows of {length} cannot be cut from a text of {len(tokens)} tokens")
    generator = torch.Generator().manual_seed(seed)
    for start in torch.randint(len(tokens) - length, (samples,), generator=generator).tolist():
        window = tokens[start : start + length + 1].long()[None]
        yield Batch((window[:, :-1],), window[:, 1:])
