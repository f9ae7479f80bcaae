"""Key screens of paged caches (op input `key_screen`): the caches that have a screen, and the shift of their keys."""

import onnx
import torch
from torch import Tensor

from sharp.core.manifest import Cache
from sharp.exporter.sources.decoder import Decoder
from sharp.models.attention import EagerAttention
from sharp.plugins.op import schema
from sharp.plugins.op.function_body import attach_function

WINDOW = 64  # tokens; a text is read in pieces of this length, at positions over the whole trained context


def screened_caches(decoder: Decoder) -> tuple[int, ...]:
    """Return the numbers of the caches whose attention nodes have the normalizer entmax, which leaves out keys."""
    parts = (part for layer in range(decoder.config.layers) for part in decoder.layer_parts(layer))
    return tuple(number for number, part in enumerate(parts) if part.config.scheme.normalizer == "entmax")


@torch.no_grad()
def key_shifts(decoder: Decoder, cache: Cache, tokens: Tensor) -> dict[str, Tensor]:
    """Return the mean key, float32 [kv_heads, head_dim], of every screened cache, by the cache's number as a text.

    The screened caches are those of `cache.key_screens`. The mean is over a text of int64 [tokens], which must have a
    token. A screen stores keys without their mean, so it spends no bits on what all
    keys have in common. Any shift gives the same result; with a good shift, few keys must be read to decide. Rotated
    keys depend on their positions, so the text is read at positions of the whole context.
    """
    config = decoder.config
    size = min(WINDOW, len(tokens), config.trained_context)
    windows = tokens[: len(tokens) // size * size].reshape(-1, size)
    starts = torch.linspace(0, config.trained_context - size, len(windows)).long()
    positions = starts[:, None] + torch.arange(size)
    attention = EagerAttention(config)
    means: dict[int, Tensor] = {}

    def measured(layer: int, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        """Compute attention, and keep the mean key [kv_heads, head_dim] of the layer."""
        means[layer] = key.float().mean((0, 1))
        return attention(layer, query, key, value, *rest)  # type: ignore[arg-type]  # the arguments that came in

    decoder.hidden_states(windows, positions, measured)
    found = {}
    for layer in range(config.layers):
        first = decoder.first_cache(layer)
        for number, part in enumerate(decoder.layer_parts(layer), first):
            if number in cache.key_screens:
                found[str(number)] = means[layer][list(part.kv_heads)].contiguous()
    return found


def leave_out_key_screens(model: onnx.ModelProto) -> None:
    """Remove key screens from a model's nodes, inputs and outputs, in place. The result of the model is the same.

    Engines without our kernels, such as TensorRT-RTX, do not support screens.
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
        values.extend(kept)  # type: ignore[arg-type]  # of the same type as before
    attach_function(model)
