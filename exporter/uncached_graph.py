"""The form without a cache (`--cache none`): the module that torch.onnx.export sees."""

import torch
from torch import Tensor, nn
from torch.export import Dim

from sharp.exporter.lowering import Tracing
from sharp.exporter.op_attributes import op_attributes
from sharp.exporter.uncached import UncachedModel
from sharp.models.attention import DEFAULT_OPTIONS, LayerOptions
from sharp.plugins.ops.torch_attention import attention as attention_op

COLLECT_STATS = "collect_stats"
STATS = "stats"


class UncachedGraph(nn.Module):
    """A model over whole sequences or sets.

    Takes the model's inputs, then collect_stats bool []. Returns the model's output and stats float32 [layers, batch,
    q_heads, queries, 4].
    """

    def __init__(self, model: UncachedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model; see the class for shapes."""
        *inputs, collect_stats = arguments
        config = self.model.config
        mask = self.model.attention_mask(*inputs)
        total_lens = None if mask is None else mask.sum(-1).to(torch.int32)
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
            del layer  # no layer has state of its own here
            output: Tensor
            output, _, _, layer_stats = attention_op(
                *(tensor.transpose(1, 2) for tensor in (query, key, value)),  # [batch, heads, tokens, dim]
                None,
                None,
                None,
                total_lens,
                head_params,
                alibi_slopes,
                collect_stats,
                **op_attributes(config, options),
            )
            stats.append(layer_stats)
            return output.transpose(1, 2)

        output = self.model.compute(attend, *inputs)
        return output, torch.stack(stats)


def trace_uncached(model: UncachedModel) -> Tracing:
    """What torch.onnx.export needs to know of `model`."""
    # Sizes other than 0 and 1, which the tracer would take for constants.
    inputs = model.draw(3, 5, torch.Generator().manual_seed(0))
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
