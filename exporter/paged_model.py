"""The paged form of a decoder (`--cache paged`): the module that torch.onnx.export sees."""

import torch
from torch import Tensor, nn
from torch.export import Dim

from sharp.exporter.decoder import Decoder
from sharp.exporter.lowering import Tracing
from sharp.exporter.op_attributes import op_attributes
from sharp.models.attention import DEFAULT_OPTIONS, LayerOptions
from sharp.plugins.ops.torch_op import paged_attention

BLOCK_SIZE = 16
# Names and dimensions of the graph's inputs, in order; the caches of every layer follow.
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
    """A decoder over the packed tokens of a step, reading and appending to paged caches.

    Shapes (T tokens, S sequences, B blocks, L layers, R rows wanted):
        input_ids, positions int64 [T]; slot_mapping int32 [T]; block_table int32 [S, max_blocks];
        query_start int32 [S + 1]; context_lens int32 [S]; collect_stats bool []; logits_indices int64 [R];
        key_caches L x [B, kv_heads, head_dim, block_size]; value_caches L x [B, kv_heads, block_size, value_dim].
    Returns logits float32 [R, vocab], stats float32 [L, T, q_heads, 4], then every layer's two updated caches.
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
        """Run one step; see the class for shapes."""
        config = self.decoder.config
        caches: list[Tensor] = []
        stats: list[Tensor] = []

        def attend(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            head_params: Tensor | None,
            alibi_slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
        ) -> Tensor:
            output: Tensor
            output, key_cache, value_cache, layer_stats = paged_attention(
                query[0],
                key[0],
                value[0],
                key_caches[layer],
                value_caches[layer],
                slot_mapping,
                block_table,
                query_start,
                context_lens,
                head_params,
                alibi_slopes,
                collect_stats,
                **op_attributes(config, options),
            )
            caches.extend((key_cache, value_cache))
            stats.append(layer_stats)
            return output[None]

        hidden = self.decoder.hidden_states(input_ids[None], positions[None], attend)
        logits = self.decoder.logits(hidden[0, logits_indices])
        return logits, torch.stack(stats), *caches


def trace_paged(decoder: Decoder) -> Tracing:
    """What torch.onnx.export needs to know of `decoder` in its paged form."""
    config = decoder.config
    layers = range(config.layers)
    key_shape = (config.kv_heads, config.head_dim, BLOCK_SIZE)
    value_shape = (config.kv_heads, BLOCK_SIZE, config.head_dim)
    blocks = 5  # like every size below: not 0 or 1, which the tracer would take for constants
    arguments = (
        torch.zeros(7, dtype=torch.int64),
        torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        torch.tensor([0, 1, 2, 3, 16, 17, 18], dtype=torch.int32),
        torch.tensor([[0, -1, -1], [1, -1, -1]], dtype=torch.int32),
        torch.tensor([0, 4, 7], dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor(True),
        torch.tensor([3, 5, 6]),
        [torch.zeros(blocks, *key_shape) for _ in layers],
        [torch.zeros(blocks, *value_shape) for _ in layers],
    )
    dynamic = [{axis: Dim.DYNAMIC for axis, _ in enumerate(dimensions)} for dimensions in INPUTS.values()]
    caches = [{0: Dim.DYNAMIC}] * config.layers
    return Tracing(
        module=PagedModel(decoder),
        arguments=arguments,
        dynamic_shapes=(*dynamic, caches, caches),
        inputs={
            **INPUTS,
            **{f"key_cache.{layer}": ("blocks", *key_shape) for layer in layers},
            **{f"value_cache.{layer}": ("blocks", *value_shape) for layer in layers},
        },
        outputs=(*OUTPUTS, *(f"{part}_cache_out.{layer}" for layer in layers for part in ("key", "value"))),
    )
