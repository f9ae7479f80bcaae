"""The module that torch.onnx.export traces for the contiguous form of a decoder (`--cache contiguous`).

Every layer has past inputs and present outputs for keys and values. A present is the past followed by the new tokens.
The tensors have the names that other tools expect.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from sharp.core.manifest import Port
from sharp.exporter.forms.uncached.model import COLLECT_STATS, STATS
from sharp.exporter.graph.lowering import TraceableModule
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.head_parts import LayerStatistics, batched_attention
from sharp.models.attention import LayerOptions
from sharp.plugins.op.torch_attention import attention as attention_op

PAST = "past_key_values.{layer}.{part}"
PRESENT = "present.{layer}.{part}"
PARTS = ("key", "value")


class ContiguousGraph(nn.Module):
    """A decoder over the new tokens of a batch of sequences that have the same length.

    Shapes (B sequences, T new tokens, P earlier tokens, L layers):
        input_ids int64 [B, T]; collect_stats bool []; pasts: key and value of every cache [B, kv_heads, P, head_dim].
    Returns logits float32 [B, T, vocab], stats float32 [L, B, q_heads, T, 4 or 5], then the presents in the order of
    the pasts, [B, kv_heads, P + T, head_dim].
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, collect_stats: Tensor, pasts: list[Tensor]) -> tuple[Tensor, ...]:
        """Return logits [batch, tokens, vocab], statistics and presents.

        Statistics are [layers, batch, q_heads, tokens, 4 or 5], and presents [batch, kv_heads, past + tokens, head_dim]
        in the order of `pasts`. `input_ids` are int64 [batch, tokens].
        """
        presents: list[Tensor] = []
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
            """Compute attention of a part of a layer's heads by the op, with its past, and keep the presents.

            Return the output and the statistics.
            """
            first = 2 * (self.decoder.first_cache(layer) + part)
            past_key, past_value = pasts[first : first + 2]
            output: Tensor
            part_stats: Tensor
            output, present_key, present_value, part_stats = attention_op(
                *(query, key, value, past_key, past_value, None, None, head_params, alibi_slopes, collect_stats),
                **attributes,
            )
            presents.extend((present_key, present_value))
            return output, part_stats

        attend = batched_attention(self.decoder.layer_parts, node, statistics)
        past = pasts[0].shape[2]
        positions = torch.arange(past, past + input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        logits = self.decoder.logits(self.decoder.hidden_states(input_ids, positions, attend)).float()
        return logits, statistics.joined(torch.stack), *presents


def contiguous_ports(decoder: Decoder) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Return the inputs and the outputs of the graph in the contiguous form."""
    config = decoder.config

    def caches(name: str, length: str) -> list[Port]:
        """Return float32 ports for keys and values of all layers; `length` names their dimension of tokens."""
        return [
            Port(
                name=name.format(layer=number, part=part),
                dtype="float32",
                shape=("batch", heads, length, size),
            )
            for number, heads in enumerate(decoder.cache_heads)
            for part, size in zip(PARTS, (config.head_dim, config.value_dim), strict=True)
        ]

    inputs = (
        Port(name="input_ids", dtype="int64", shape=("batch", "tokens"), doc="new tokens; no padding"),
        Port(name=COLLECT_STATS, dtype="bool", shape=(), doc="whether to compute stats; false if not fed"),
        *caches(PAST, "past"),
    )
    outputs = (
        Port(name="logits", dtype="float32", shape=("batch", "tokens", config.vocab_size), doc="of the next token"),
        Port(
            name=STATS,
            dtype="float32",
            shape=(config.layers, "batch", config.q_heads, "tokens", 4),
            doc="entropy in nats, support, inverse temperature, logit spread",
        ),
        *caches(PRESENT, "total"),
    )
    return inputs, outputs


def trace_contiguous(decoder: Decoder) -> TraceableModule:
    """Return the module, example arguments and names for tracing `decoder` in its contiguous form."""
    inputs, outputs = contiguous_ports(decoder)
    config = decoder.config
    batch, tokens, past = 2, 3, 4  # the tracer would take sizes of 0 or 1 for constants
    sizes = (config.head_dim, config.value_dim)
    pasts = [torch.zeros(batch, heads, past, size) for heads in decoder.cache_heads for size in sizes]
    return TraceableModule(
        module=ContiguousGraph(decoder),
        arguments=(torch.zeros(batch, tokens, dtype=torch.int64), torch.tensor(True), pasts),
        dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {}, [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC} for _ in pasts]),
        inputs={port.name: port.shape for port in inputs},
        outputs=tuple(port.name for port in outputs),
        defaults={COLLECT_STATS: False},
    )
