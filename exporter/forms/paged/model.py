"""The module that torch.onnx.export traces for the paged form of a decoder (`--cache paged`)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from sharp.core.manifest import Cache
from sharp.exporter.graph.graph_options import SCALED_DTYPES, TORCH_DTYPES
from sharp.exporter.graph.lowering import TraceableModule
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.head_parts import LayerStatistics, attention_of_nodes
from sharp.models.attention import LayerOptions
from sharp.plugins.op.cache_tensors import cache_tensors
from sharp.plugins.op.torch_paged_attention import paged_attention

# Names and dimensions of the graph's first inputs, in order. The inputs for caches follow.
INPUTS: dict[str, tuple[str | int, ...]] = {
    "input_ids": ("tokens",),
    "positions": ("tokens",),
    "slot_mapping": ("tokens",),
    "block_table": ("sequences", "max_blocks"),
    "query_start": ("sequences_plus_1",),
    "context_lens": ("sequences",),
    "collect_stats": (),
    "logits_indices": ("outputs",),
}
OUTPUTS = ("logits", "stats")


class PagedModel(nn.Module):
    """A decoder over the packed tokens of a step, which reads paged caches and appends to them.

    Shapes (T tokens, S sequences, B blocks, L layers, R rows of logits):
        input_ids, positions int64 [T]; slot_mapping int32 [T]; block_table int32 [S, max_blocks];
        query_start int32 [S + 1]; context_lens int32 [S]; collect_stats bool []; logits_indices int64 [R];
        key_caches L x [B, kv_heads, head_dim, block_size]; value_caches L x [B, kv_heads, block_size, value_dim].
    Returns logits float32 [R, vocab], stats float32 [L, T, q_heads, 4 or 5], then every layer's two updated caches.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        collect_stats: Tensor,
        logits_indices: Tensor,
        key_caches: list[Tensor],
        value_caches: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return logits [rows, vocab], statistics and each layer's two updated caches.

        Statistics are [layers, tokens, q_heads, 4 or 5]. The shapes of the inputs are in the description of the class.
        """
        caches: list[Tensor] = []
        statistics = LayerStatistics()

        def node(
            layer: int,
            part: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            head_params: Tensor | None,
            alibi_slopes: Tensor | None,
            _: LayerOptions,
            attributes: dict[str, Any],
        ) -> tuple[Tensor, Tensor]:
            """Compute attention of a part of a layer's heads by the op, which updates their caches.

            Return the output and the statistics.
            """
            cache = self.decoder.first_cache(layer) + part
            output: Tensor
            part_stats: Tensor
            output, key_cache, value_cache, part_stats = paged_attention(
                *(query, key, value, key_caches[cache], value_caches[cache]),
                *(slot_mapping, block_table, query_start, context_lens, head_params, alibi_slopes, collect_stats),
                **attributes,
            )
            caches.extend((key_cache, value_cache))
            return output, part_stats

        def packed(heads: Tensor) -> Tensor:
            """Return heads as [tokens, heads, dim], without the batch, in the dtype that the op takes here."""
            # If cache and queries differ in type and the cache has no scales, the op takes float32 queries only.
            return heads[0] if key_caches[0].dtype in (heads.dtype, *SCALED_DTYPES) else heads[0].float()

        attend = attention_of_nodes(self.decoder.layer_parts, node, statistics, packed, lambda output: output[None])
        hidden = self.decoder.hidden_states(input_ids[None], positions[None], attend)
        logits = self.decoder.logits(hidden[0, logits_indices]).float()
        # torch.stack would add an Unsqueeze node for every layer.
        stats = statistics.joined(lambda layers: torch.cat(layers).unflatten(0, (len(layers), -1)))
        return logits, stats, *caches


def trace_paged(decoder: Decoder, cache: Cache) -> TraceableModule:
    """Return the module, example arguments and names for tracing `decoder` in its paged form."""
    config = decoder.config
    block_size, cache_dtype = cache.block_size, TORCH_DTYPES[cache.dtype]
    tensors = cache_tensors(cache, config.layers, config.kv_heads, config.head_dim, config.value_dim)
    keys, values = (
        [tensor for tensor in tensors if tensor.name.startswith(f"{kind}_cache")] for kind in ("key", "value")
    )
    blocks = 5  # the tracer would take sizes of 0 or 1 for constants, here and below
    arguments = (
        torch.zeros(7, dtype=torch.int64),
        torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        torch.tensor([0, 1, 2, 3, block_size, block_size + 1, block_size + 2], dtype=torch.int32),
        torch.tensor([[0, -1, -1], [1, -1, -1]], dtype=torch.int32),
        torch.tensor([0, 4, 7], dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor(True),
        torch.tensor([3, 5, 6]),
        *([torch.zeros(blocks, *tensor.block_shape, dtype=cache_dtype) for tensor in part] for part in (keys, values)),
    )
    dynamic = [{axis: Dim.DYNAMIC for axis, _ in enumerate(dimensions)} for dimensions in INPUTS.values()]
    # Only the op uses the number of blocks. It is static for the tracer, which is slower with dynamic sizes.
    caches = [None] * len(keys)
    return TraceableModule(
        module=PagedModel(decoder),
        arguments=arguments,
        dynamic_shapes=(*dynamic, caches, caches),
        inputs={
            **INPUTS,
            **{tensor.name: ("blocks", *tensor.block_shape) for tensor in (*keys, *values)},
        },
        outputs=(*OUTPUTS, *(tensor.updated_name for pair in zip(keys, values, strict=True) for tensor in pair)),
        beside=tuple(tensor for tensor in tensors if tensor.name.partition(".")[0] in (*cache.beside, "key_screen")),
    )
