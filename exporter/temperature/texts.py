"""What `sharp fit-temperature` fits a Hugging Face model to: windows of a text, read by its own tokenizer."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.checkpoints.source import Source
from sharp.exporter.verification.perplexity import read_tokens
from sharp.models.attention import AttentionFunction
from sharp.models.config import SharpConfig
from sharp.models.evaluation import parse_lengths
from sharp.models.objective import Batch
from sharp.models.temperature_data import TEXT_WINDOW, Data, check_recorded
from sharp.plugins.errors import InputError

WINDOWS = 4
MOST_TOKENS = 2**17


class DecoderModel:
    """A decoder of the exporter as `language_points` takes a model."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def config(self) -> SharpConfig:
        """Its shape."""
        return self._decoder.config

    def __call__(self, input_ids: Tensor, *, attention: AttentionFunction) -> Tensor:
        """Tokens int64 [batch, tokens] -> logits [batch, tokens, vocab]."""
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self._decoder.logits(self._decoder.hidden_states(input_ids, positions, attention))


def find_texts(path: Path, lengths: str | None, text: Path | None) -> tuple[DecoderModel, Data]:
    """A Hugging Face folder or a .gguf file, and windows of a text for it.

    Without `text` they are of the documentation in Python's standard library.

    Raises:
        NotFoundError, InputError: the model or the text cannot be read, the model is no language model, or a length is
            not for it.
    """
    source = read_source(path, "softmax")
    decoder = source.model
    if not isinstance(decoder, Decoder) or source.write_tokenizer is None:
        raise InputError(
            f"{path} is no causal language model with a tokenizer; the temperature is fitted to next tokens"
        )
    if not source.trained:
        raise InputError(f"adaptive temperature is for models that were trained with softmax, and {path} was not")
    sizes = (TEXT_WINDOW,) if lengths is None else parse_lengths(lengths)
    model = DecoderModel(decoder)
    for length in sizes:
        if length > model.config.max_context:
            raise InputError(f"--lengths has {length}, and the context of {path} is {model.config.max_context} tokens")
        check_recorded(model.config, length)
    name, tokens = _tokens(source, text)
    if len(tokens) <= max(sizes):
        raise InputError(f"windows of {max(sizes)} cannot be cut from {name}, a text of {len(tokens)} tokens")

    def windows(samples: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for length in sizes:
            for start in torch.randint(len(tokens) - length, (samples,), generator=generator).tolist():
                window = tokens[start : start + length + 1][None]
                yield Batch((window[:, :-1],), window[:, 1:])

    description = f"{name}, windows of {', '.join(map(str, sizes))}"
    return model, Data(description, WINDOWS, windows, lambda samples: samples * len(sizes))


def _tokens(source: Source, text: Path | None) -> tuple[str, Tensor]:
    """The name of the text and its tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source.save_tokenizer(folder)
        path = text
        if path is None:
            path = folder / "documentation.txt"
            path.write_text("\n".join(topics.values()), encoding="utf-8")
        found, tokens = read_tokens(path, folder / "tokenizer.json", source.model.config.vocab_size, MOST_TOKENS)
    return found if text is not None else "Python's documentation", tokens
