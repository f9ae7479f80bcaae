"""The module that torch.onnx.export traces for the form without a cache (`--cache none`)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from sharp.exporter.graph.lowering import TraceableModule
from sharp.exporter.sources.head_parts import LayerStatistics, batched_attention
from sharp.exporter.sources.uncached_model import UncachedModel
from sharp.models.attention import LayerOptions
from sharp.plugins.op.torch_attention import attention as attention_op

COLLECT_STATS = "collect_stats"
STATS = "stats"


class UncachedGraph(nn.Module):
    """A model over whole sequences or sets.

    The module takes the model's inputs, then collect_stats bool []. It returns the model's output and stats float32
    [layers, batch, q_heads, queries, 4 or 5].
    """

    def __init__(self, model: UncachedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's output, and statistics [layers, batch, q_heads, queries, 4 or 5].

        `arguments` are the model's inputs, then collect_stats, a bool [].
        """
        *inputs, collect_stats = arguments
        mask = self.model.attention_mask(*inputs)
        total_lens = None if mask is None else mask.sum(-1).to(torch.int32)
        statistics = LayerStatistics()

        def node(
            _layer: int,
            _part: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            head_params: Tensor | None,
            alibi_slopes: Tensor | None,
            options: LayerOptions,
            attributes: dict[str, Any],
        ) -> tuple[Tensor, Tensor]:
            """Compute attention of a layer's heads by the op without a cache; return the output and the statistics."""
            lens = total_lens if options.total_lens is None else options.total_lens.to(torch.int32)
            output: Tensor
            part_stats: Tensor
            output, _, _, part_stats = attention_op(
                *(query, key, value, None, None, None, lens, head_params, alibi_slopes, collect_stats), **attributes
            )
            return output, part_stats

        attend = batched_attention(self.model.layer_parts, node, statistics)
        output = self.model.compute(attend, *inputs).float()
        return output, statistics.joined(self.model.stack)


def trace_uncached(model: UncachedModel) -> TraceableModule:
    """Return the module, random arguments and names for tracing `model` without a cache."""
    # The tracer would take sizes of 0 or 1 for constants.
    inputs = model.random_inputs(3, 5, torch.Generator().manual_seed(0))
    dynamic = [
        {axis: Dim.DYNAMIC for axis, dimension in enumerate(port.shape) if isinstance(dimension, str)}
        for port in model.inputs
    ]
    return TraceableModule(
        module=UncachedGraph(model),
        arguments=(*inputs, torch.tensor(True)),
        dynamic_shapes=((*dynamic, {}),),
        inputs={**{port.name: port.shape for port in model.inputs}, COLLECT_STATS: ()},
        outputs=(model.output.name, STATS),
        # The default lets tools that do not know collect_stats leave this input out.
        defaults={COLLECT_STATS: False},
    )
