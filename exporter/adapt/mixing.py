"""Corrections of head outputs: one matrix per query head brings its output under the new norm near that of softmax.

The matrix M of a head minimizes |o' M - o|^2 + w |M - 1|^2 over some queries, where o is the head's output under
softmax and o' that under the norm. Its solution is closed, and it costs nothing later: `fold_mixings` multiplies it
into the output projection of the attention module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sharp.models.adapted_model import attention_norms

RIDGE = 1e-2  # the weight w, as a share of the mean square of a column of o'
FOLD_ERROR = 1e-3  # largest change of a logit, as a share of the largest; rounding is far below
PROBED_TOKENS = 16
PROBED_SIZE = 0.1  # size of the entries of M - 1 of the probe


@dataclass
class OutputSums:
    """Sums over queries of products of head outputs, float64: x under the norm, y under softmax.

    `xx` and `xy` are [heads, dim, dim], `yy` is [heads].
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor

    @classmethod
    def empty(cls, heads: int, dim: int) -> "OutputSums":
        """Return the sums over no query."""
        return cls(
            *(torch.zeros(shape, dtype=torch.float64) for shape in ((heads, dim, dim), (heads, dim, dim), heads))
        )

    def add(self, normed: Tensor, softmax: Tensor) -> None:
        """Add the outputs [heads, queries, dim] of some queries under the norm and under softmax."""
        x, y = normed.double(), softmax.double()
        self.xx += (x.mT @ x).cpu()
        self.xy += (x.mT @ y).cpu()
        self.yy += y.square().sum((1, 2)).cpu()

    def solve(self) -> Tensor:
        """Return the best matrix of every head, float64 [heads, dim, dim]."""
        one = torch.eye(self.xx.shape[-1], dtype=torch.float64)
        weight = (RIDGE * self.xx.diagonal(dim1=1, dim2=2).mean(1)).clamp(min=1e-30)[:, None, None]
        return torch.linalg.solve(self.xx + weight * one, self.xy + weight * one)

    def errors(self, mixing: Tensor) -> Tensor:
        """Return the relative errors |x M - y| / |y| [heads] of the matrices `mixing` [heads, dim, dim]."""
        squares = (mixing * (self.xx @ mixing)).sum((1, 2)) - 2 * (mixing * self.xy).sum((1, 2)) + self.yy
        return (squares.clamp(min=0) / self.yy.clamp(min=1e-30)).sqrt()


@torch.no_grad()
def takes_mixings(model: PreTrainedModel, attention_modules: Sequence[str]) -> bool:
    """Whether matrices of heads can become part of the output projections of all attention modules.

    The model, in which `attach` has put its norms, computes a few tokens with random matrices as they are and folded
    into the projections, and is left as it was.
    """
    norms = attention_norms(model)
    dims: list[int] = []
    for norm in norms:
        norm.observer = lambda _heads, _query, _key, value, _options: dims.append(value.shape[-1])
    try:
        model(input_ids=_probe(model), use_cache=False)
    finally:
        for norm in norms:
            norm.observer = None
    projections = _output_projections(model, attention_modules)
    if projections is None or len(dims) != len(norms):
        return False
    widths = [norm.described.q_heads * dim for norm, dim in zip(norms, dims, strict=True)]
    if [_width(projection) for projection in projections] != widths:
        return False
    generator = torch.Generator().manual_seed(0)
    for norm, projection, dim in zip(norms, projections, dims, strict=True):
        heads = norm.described.q_heads
        noise = PROBED_SIZE * torch.randn(heads, dim, dim, generator=generator)
        norm.mixing = (torch.eye(dim) + noise).to(projection.weight)
    kept = [projection.weight.clone() for projection in projections]
    try:
        return fold_mixings(model, attention_modules)
    finally:
        for norm, projection, weight in zip(norms, projections, kept, strict=True):
            norm.mixing = None
            projection.weight.copy_(weight)


@torch.no_grad()
def fold_mixings(model: PreTrainedModel, attention_modules: Sequence[str]) -> bool:
    """Multiply the matrices of all heads into the output projections, in place, and say whether the logits stay.

    If they do not, or a module has no such projection, the model is left as it was, with its matrices.
    """
    norms = attention_norms(model)
    if all(norm.mixing is None for norm in norms):
        return True
    projections = _output_projections(model, attention_modules)
    if projections is None:
        return False
    tokens = _probe(model)
    before = model(input_ids=tokens, use_cache=False).logits
    kept = [(norm.mixing, projection.weight.clone()) for norm, projection in zip(norms, projections, strict=True)]
    for norm, projection in zip(norms, projections, strict=True):
        if norm.mixing is None:
            continue
        transposed = isinstance(projection, Conv1D)  # weight [in, out] instead of [out, in]
        weight = projection.weight.T if transposed else projection.weight
        by_head = weight.unflatten(1, (len(norm.mixing), -1))
        folded = torch.einsum("ohd,hcd->ohc", by_head, norm.mixing.to(weight.dtype)).flatten(1)
        projection.weight.copy_(folded.T if transposed else folded)
        norm.mixing = None
    after = model(input_ids=tokens, use_cache=False).logits
    if (after - before).abs().max() <= FOLD_ERROR * before.abs().max():
        return True
    for norm, projection, (mixing, weight) in zip(norms, projections, kept, strict=True):
        norm.mixing = mixing
        projection.weight.copy_(weight)
    return False


def _probe(model: PreTrainedModel) -> Tensor:
    """Return token ids int64 [1, `PROBED_TOKENS`] on the model's device."""
    vocabulary: Any = model.get_input_embeddings()
    return torch.arange(PROBED_TOKENS, device=vocabulary.weight.device)[None] % vocabulary.num_embeddings


def _output_projections(model: PreTrainedModel, attention_modules: Sequence[str]) -> list[Any] | None:
    """Return what may be the output projection of each attention module; None if a module has no linear layer.

    It is the module's last linear layer. The caller checks that it is the right one.
    """
    found: list[Any] = []
    for name in attention_modules:
        linear = [
            module
            for child, module in model.get_submodule(name).named_modules()
            if isinstance(module, nn.Linear | Conv1D) and not ({"sharp_norm", "lora_A", "lora_B"} & {*child.split(".")})
        ]
        if not linear:
            return None
        found.append(linear[-1])
    return found


def _width(projection: nn.Linear | Conv1D) -> int:
    """Return the number of inputs of a projection."""
    return projection.weight.shape[0] if isinstance(projection, Conv1D) else projection.weight.shape[1]
