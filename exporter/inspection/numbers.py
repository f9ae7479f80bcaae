"""What models of sets and of numbers are inspected with: random ones as their tasks have them, or those of a file."""

import json

import numpy as np

from sharp.exporter.inspection.prompt import DEFAULT_TOKENS, MIN_TOKENS, Prompt, TokenizedText
from sharp.exporter.inspection.recording import Floats, InspectedModel
from sharp.plugins.errors import InputError, NotFoundError


def read_numbers(prompt: Prompt, model: InspectedModel) -> TokenizedText:
    """Numbers [tokens], or the items [items, width] of a set.

    Raises:
        InputError: a text is given, or there are too few or too many, or the file has something else.
        NotFoundError: there is no such file.
    """
    width = model.numbers_of_item
    assert width is not None
    if any(source is not None for source in (prompt.file, prompt.text, prompt.token_ids)):
        raise InputError(f"{model.name} reads {model.unit}s, not text; give --numbers, or nothing for random ones")
    if prompt.numbers is None:
        values = random_numbers(width, min(prompt.max_tokens or DEFAULT_TOKENS, model.max_context))
        described = "random ones"
    else:
        values = _from_file(prompt, model, width)[: prompt.max_tokens]
        described = str(prompt.numbers)
    if not MIN_TOKENS <= len(values) <= model.max_context:
        limits = f"it must have {MIN_TOKENS} to {model.max_context} of them (--max-tokens cuts it)"
        raise InputError(f"{described} has {len(values)} {model.unit}s; {limits}")
    return TokenizedText(values, tuple(map(_piece, values)), described)


def random_numbers(width: int, count: int) -> Floats:
    """Normal numbers, or items of a uniform priority and a random class as a one-hot vector."""
    generator = np.random.default_rng(0)
    if not width:
        return generator.standard_normal(count).astype(np.float32)
    classes = np.eye(width - 1)[generator.integers(width - 1, size=count)]
    return np.concatenate([generator.random((count, 1)), classes], axis=1).astype(np.float32)


def _from_file(prompt: Prompt, model: InspectedModel, width: int) -> Floats:
    file = prompt.numbers
    assert file is not None
    needed = f"a list of items, each a list of {width} numbers" if width else "a list of numbers"
    try:
        values = np.array(json.loads(file.read_bytes()), np.float64)
    except FileNotFoundError as error:
        raise NotFoundError(f"--numbers {file} does not exist; give a file of JSON, {needed}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"--numbers {file} cannot be read as JSON, {needed}: {error}"[:300]) from error
    if values.shape[1:] != ((width,) if width else ()) or values.ndim == 0 or not np.isfinite(values).all():
        raise InputError(f"--numbers {file} must be {needed}, all finite, for {model.name}")
    return values.astype(np.float32)


def _piece(value: Floats) -> str:
    """A number, or an item as its priority and class."""
    if value.ndim == 0:
        return f"{value:.3g} "
    return f"{value[0]:.3g}:{int(value[1:].argmax())} "
