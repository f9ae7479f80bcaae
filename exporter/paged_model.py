"""The paged form of a decoder (`--cache paged`): the module that torch.onnx.export sees."""

import torch
from torch import Tensor, nn

from sharp.exporter.decoder import Decoder
from sharp.plugins.ops.torch_op import paged_attention

# Names and order of the graph's inputs and outputs; the caches of every layer follow.
INPUTS = (
    "input_ids",
    "positions",
    "slot_mapping",
    "block_table",
    "query_start",
    "context_lens",
    "collect_stats",
    "logits_indices",
)
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
                normalizer=config.scheme.normalizer,
                scale=config.scale,
                alpha=config.alpha,
                temperature_coefficients=list(config.temperature_coefficients),
                entropy_threshold=config.entropy_threshold,
            )
            caches.extend((key_cache, value_cache))
            stats.append(layer_stats)
            return output[None]

        hidden = self.decoder.hidden_states(input_ids[None], positions[None], attend)
        logits = self.decoder.logits(hidden[0, logits_indices])
        return logits, torch.stack(stats), *caches
