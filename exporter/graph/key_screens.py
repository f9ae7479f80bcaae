"""Key screens of the paged caches (op input `key_screen`): which caches have one, and the shift of their keys."""

import onnx
import torch
from torch import Tensor

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.models.attention import EagerAttention
from sharp.plugins.manifest import Cache
from sharp.plugins.ops import schema
from sharp.plugins.ops.function_body import attach_function

WINDOW = 64  # tokens; a text is read in so short pieces, at positions from the first to the last that were trained


def screened_caches(decoder: Decoder) -> tuple[int, ...]:
    """The numbers of the caches whose attention nodes leave out keys: those with the normalizer entmax."""
    parts = (part for layer in range(decoder.config.layers) for part in decoder.layer_parts(layer))
    return tuple(number for number, part in enumerate(parts) if part.config.scheme.normalizer == "entmax")


@torch.no_grad()
def key_shifts(decoder: Decoder, cache: Cache, tokens: Tensor) -> dict[str, Tensor]:
    """The mean key of every screened cache, float32 [kv_heads, head_dim], by its number; over int64 [tokens].

    What all keys have in common needs no bits of a screen. Any shift leaves the result what it is; a good one leaves
    few keys in doubt. Rotated keys depend on their positions, so the text is read at positions of the whole context.
    """
    config = decoder.config
    size = min(WINDOW, len(tokens), config.trained_context)
    windows = tokens[: len(tokens) // size * size].reshape(-1, size)
    starts = torch.linspace(0, config.trained_context - size, len(windows)).long()
    positions = starts[:, None] + torch.arange(size)
    attention = EagerAttention(config)
    means: dict[int, Tensor] = {}

    def measured(layer: int, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        means[layer] = key.float().mean((0, 1))
        return attention(layer, query, key, value, *rest)  # type: ignore[arg-type]  # handed on as they came

    decoder.hidden_states(windows, positions, measured)
    found = {}
    for layer in range(config.layers):
        first = decoder.first_cache(layer)
        for number, part in enumerate(decoder.layer_parts(layer), first):
            if number in cache.key_screens:
                found[str(number)] = means[layer][list(part.kv_heads)].contiguous()
    return found


def leave_out_key_screens(model: onnx.ModelProto) -> None:
    """Take the screens from a model's nodes, inputs and outputs, for engines that have none; the result is the same.

    TensorRT-RTX runs no kernel of ours.
    """
    graph = model.graph
    for node in graph.node:
        if (node.domain, node.op_type) == (schema.DOMAIN, schema.PAGED_ATTENTION.name):
            del node.input[len(schema.INPUTS) :]
            del node.output[len(schema.OUTPUTS) :]
    for values in (graph.input, graph.output, graph.initializer):
        kept = [
            value for value in values if not value.name.startswith(("key_screen.", "key_screen_out.", "key_shift."))
        ]
        del values[:]
        values.extend(kept)  # type: ignore[arg-type]  # inputs or outputs, as they were
    attach_function(model)
