"""The function from logits to weights that a graph computes between the two products of attention, masks included.

The function is evaluated in float64, at logits that the fits in `norm_fits` and the checks in `norms` choose. The
names of the operators between the products do not matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.attention_call import AttentionCall
from sharp.exporter.programs.logits import MASKED, logits_of, narrow_value_of, operand_shapes, shape_of_logits, value_of
from sharp.exporter.programs.program import Program


def hides(program: Program, call: AttentionCall, given: Mapping[Node, Tensor], logits: Tensor) -> Tensor:
    """Return which keys have no weight although the logits [batch, heads, queries, keys] of a row are all 1.

    Logits that are already masked, -inf or far below 0, stay as they are. Every norm of the op gives a logit of 1 a
    weight if all are 1, so a key without a weight was masked in the norm or after it.
    """
    assert call.written_out is not None
    parts = call.written_out
    ones = torch.where(logits > MASKED, 1.0, logits).float()
    values = {**given, parts.logits.node: parts.logits.fold(ones)}
    shape = shape_of_logits(program, call, given)
    weights = parts.weights.unfold(narrow_value_of(program, values, parts.weights.node), shape)
    return (weights == 0) | weights.isnan()  # NaN is a row without visible keys, divided by its sum of 0


@dataclass(frozen=True)
class Weighting:
    """The part of a graph from the logits of `call` to its weights, at inputs `given` of one size.

    `base` are the logits [batch, heads, queries, keys] if all products are 0: masks and biases.
    """

    program: Program
    call: AttentionCall
    given: Mapping[Node, Tensor]
    base: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of logits and weights, [batch, heads, queries, keys]."""
        return tuple(self.base.shape)

    @cached_property
    def visible(self) -> Tensor:
        """The keys that are masked neither before, in nor after the norm, bool [batch, heads, queries, keys]."""
        return (self.base > MASKED) & ~hides(self.program, self.call, self.given, self.base)

    def __call__(self, z: Tensor) -> Tensor:
        """Return the weights of logits `z`, float64 [batch, heads, queries, keys]; masked logits stay as they are."""
        call, parts = self.call, self.call.written_out
        assert parts is not None
        shape = shape_of_logits(self.program, call, self.given)
        value = torch.where(self.base > MASKED, z, self.base)
        given = {**self.given, parts.logits.node: parts.logits.fold(value)}
        weights = parts.weights.unfold(value_of(self.program, given, parts.weights.node), shape).double()
        return weights if call.result is parts.mixed else weights * self._divided(given)

    def _divided(self, given: Mapping[Node, Tensor]) -> Tensor:
        """Return the factor [batch, heads, queries, 1] that the graph applies after the product with values."""
        call, parts = self.call, self.call.written_out
        assert parts is not None
        given = {**given, call.value.node: torch.ones(self.program.shape_at(call.value.node, given))}
        before, after = (value_of(self.program, given, node).double() for node in (parts.mixed, call.result))
        query, _, value = operand_shapes(self.program, call, self.given)
        places = torch.arange(query[:3].numel() * value[3]).reshape(*query[:3], value[3])
        factor = torch.empty(places.numel(), dtype=torch.float64)
        factor[call.restore(places).flatten()] = torch.where(before != 0, after / before, 0.0).flatten()
        return factor.reshape(places.shape).mean(-1, keepdim=True)


def weighting(program: Program, call: AttentionCall, given: Mapping[Node, Tensor]) -> Weighting:
    """Return the function from the logits of `call`, which is written out, to its weights, at the inputs `given`.

    Raises:
        RuntimeError: the node has no logit for every query and key.
    """
    return Weighting(program, call, given, logits_of(program, call, given, 0.0))
