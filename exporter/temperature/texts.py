"""Windows of a text, in tokens of a Hugging Face model, to which `sharp fit-temperature` fits the model."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.source import Source
from sharp.exporter.verification.perplexity import read_tokens
from sharp.models.attention import AttentionFunction
from sharp.models.config import SharpConfig
from sharp.models.evaluation import parse_lengths
from sharp.models.objective import TrainingBatch
from sharp.models.temperature_data import TEXT_WINDOW, Data, check_recorded

WINDOWS = 4
MOST_TOKENS = 2**17


class DecoderModel:
    """A decoder of the exporter, with the interface that `language_points` needs."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def config(self) -> SharpConfig:
        """The shape and norm of the decoder."""
        return self._decoder.config

    def __call__(self, input_ids: Tensor, *, attention: AttentionFunction) -> Tensor:
        """Compute logits [batch, tokens, vocab] of token ids int64 [batch, tokens]."""
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self._decoder.logits(self._decoder.hidden_states(input_ids, positions, attention))


def find_texts(
    path: Path, lengths: str | None, text: Path | None, ignore: Sequence[str] = ()
) -> tuple[DecoderModel, Data]:
    """Open a Hugging Face folder or a .gguf file, and make windows of a text for the model.

    `lengths` are the tokens of the windows, as "256,512"; None means 512. Without `text`, the text is the documentation
    in Python's standard library. `ignore` names unknown keys of the checkpoint to accept. A batch of the data is one
    window: inputs and next tokens int64 [1, length].

    Raises:
        NotFoundError, InputError: the model or the text cannot be read, the model is no language model with a tokenizer
            or was not trained with softmax, or a length is too large for the model, the text or the memory.
    """
    source = read_source(path, "softmax", ignore=ignore)
    decoder = source.model
    if not isinstance(decoder, Decoder) or source.write_tokenizer is None:
        raise InputError(
            f"{path} is no causal language model with a tokenizer; the temperature is fitted to next tokens"
        )
    if not source.trained:
        raise InputError(
            f"adaptive temperature is for models that were trained with softmax, and {path} was not; give another "
            "checkpoint"
        )
    sizes = (TEXT_WINDOW,) if lengths is None else parse_lengths(lengths)
    model = DecoderModel(decoder)
    for length in sizes:
        if length > model.config.max_context:
            raise InputError(
                f"--lengths has {length}, and the context of {path} is {model.config.max_context} tokens; give at "
                "most that"
            )
        check_recorded(model.config, length)
    name, tokens = _tokens(source, text)
    if len(tokens) <= max(sizes):
        raise InputError(
            f"windows of {max(sizes)} cannot be cut from {name}, a text of {len(tokens)} tokens; give a longer "
            "--text, or smaller --lengths"
        )

    def windows(samples: int, seed: int) -> Iterator[TrainingBatch]:
        """Yield random windows of the text, `samples` of each length, with the next tokens as targets."""
        generator = torch.Generator().manual_seed(seed)
        for length in sizes:
            for start in torch.randint(len(tokens) - length, (samples,), generator=generator).tolist():
                window = tokens[start : start + length + 1][None]
                yield TrainingBatch((window[:, :-1],), window[:, 1:])

    description = f"{name}, windows of {', '.join(map(str, sizes))}"
    return model, Data(description, WINDOWS, windows, lambda samples: samples * len(sizes))


def _tokens(source: Source, text: Path | None) -> tuple[str, Tensor]:
    """Return the name of the text and its first 131,072 tokens int64 [tokens]."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source.save_tokenizer(folder)
        path = text
        if path is None:
            path = folder / "documentation.txt"
            path.write_text("\n".join(topics.values()), encoding="utf-8")
        found, tokens = read_tokens(path, folder / "tokenizer.json", source.model.config.vocab_size, MOST_TOKENS)
    return found if text is not None else "Python's documentation", tokens
