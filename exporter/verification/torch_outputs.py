"""The outputs of a decoder in PyTorch, with which the written model is compared; PyTorch in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.verification.comparison import CaseOutputs, Floats, Tokens
from sharp.models.attention import EagerAttention
from sharp.plugins.op.torch_normalizers import entropy

ROUNDING = 2.0**-23  # relative size of the changes of `with_rounding_noise`: a unit in the last place of float32


@torch.no_grad()
def torch_case_outputs(decoder: Decoder, tokens: Tokens) -> CaseOutputs:
    """Compute one uncached pass over int64 [tokens], in the decoder's precision.

    The logits are computed by the source's own code if that code has the norm, else with the attention of
    `sharp.models`.
    """
    input_ids = torch.from_numpy(tokens)[None]
    attention = EagerAttention(decoder.config, record=True)
    keys: list[Floats] = []
    values: list[Floats] = []

    def recorded(layer: int, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        """Compute attention of a layer, and keep its keys and values as the caches have them."""
        for part in decoder.layer_parts(layer):  # each part has one cache
            keys.append(key[0, :, list(part.kv_heads)].numpy())
            values.append(value[0, :, list(part.kv_heads)].numpy())
        return attention(layer, query, key, value, *rest)

    hidden = decoder.hidden_states(input_ids, torch.arange(len(tokens))[None], recorded)
    logits = decoder.own_logits(input_ids)
    if logits is None:
        logits = decoder.logits(hidden)
    entropies = torch.stack([entropy(weights)[0].T for weights in attention.weights])  # [layers, tokens, q_heads]
    return CaseOutputs(logits[0].numpy(), entropies.numpy(), tuple(keys), tuple(values))


@torch.no_grad()
def torch_logits(decoder: Decoder, tokens: Tokens) -> Floats:
    """Compute the logits [tokens, vocab] of a sequence int64 [tokens], without entropies and caches."""
    input_ids = torch.from_numpy(tokens)[None]
    logits = decoder.own_logits(input_ids)
    if logits is None:
        positions = torch.arange(len(tokens))[None]
        logits = decoder.logits(decoder.hidden_states(input_ids, positions, EagerAttention(decoder.config)))
    found: Floats = np.asarray(logits[0].numpy(), np.float32)
    return found


@contextmanager
def with_rounding_noise(model: nn.Module, seed: int) -> Iterator[None]:
    """Change every output of a linear layer of `model` inside the context by a random part of a rounding unit.

    The relative changes are uniform in ±2^-23, as of another order of float32 sums. How far the model's outputs move
    shows how much it amplifies rounding, where one run in float32 may be right by chance.
    """
    generator = torch.Generator().manual_seed(seed)

    def changed(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        """Return the output of a layer with its noise."""
        noise = torch.rand(output.shape, generator=generator, dtype=torch.float32) * 2 - 1
        return output * (1 + ROUNDING * noise).to(output)

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    hooks = [layer.register_forward_hook(changed) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Float64Mode(TorchFunctionMode):
    """A mode that replaces float32 by float64 in every call, because some modules of transformers ask for float32."""

    def __torch_function__(
        self, function: Any, _types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = tuple(_wider(argument) for argument in arguments)
        return function(*wide, **{name: _wider(argument) for name, argument in (named or {}).items()})


def _wider(argument: Any) -> Any:
    """Return torch.float64 for torch.float32, and any other argument unchanged."""
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Make `model` compute in float64 inside the context, with its float32 weights, to show its own rounding errors.

    The weights take twice their memory inside the context. Afterwards they are float32 with the same bits as before.
    """
    model.double()
    try:
        with _Float64Mode():
            yield
    finally:
        model.float()
