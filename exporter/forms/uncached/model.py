"""The form without a cache (`--cache none`): the module that torch.onnx.export sees."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from sharp.exporter.checkpoints.uncached_model import UncachedModel
from sharp.exporter.graph.head_parts import LayerStatistics, batched_attention
from sharp.exporter.graph.lowering import Tracing
from sharp.models.attention import LayerOptions
from sharp.plugins.ops.torch_attention import attention as attention_op

COLLECT_STATS = "collect_stats"
STATS = "stats"


class UncachedGraph(nn.Module):
    """A model over whole sequences or sets.

    Takes the model's inputs, then collect_stats bool []. Returns the model's output and stats float32 [layers, batch,
    q_heads, queries, 4 or 5].
    """

    def __init__(self, model: UncachedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model; see the class for shapes."""
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


def trace_uncached(model: UncachedModel) -> Tracing:
    """What torch.onnx.export needs to know of `model`."""
    # Sizes other than 0 and 1, which the tracer would take for constants.
    inputs = model.random_inputs(3, 5, torch.Generator().manual_seed(0))
    dynamic = [
        {axis: Dim.DYNAMIC for axis, dimension in enumerate(port.shape) if isinstance(dimension, str)}
        for port in model.inputs
    ]
    return Tracing(
        module=UncachedGraph(model),
        arguments=(*inputs, torch.tensor(True)),
        dynamic_shapes=((*dynamic, {}),),
        inputs={**{port.name: port.shape for port in model.inputs}, COLLECT_STATS: ()},
        outputs=(model.output.name, STATS),
        # Other tools need not know of it: it is false unless it is fed.
        defaults={COLLECT_STATS: False},
    )
