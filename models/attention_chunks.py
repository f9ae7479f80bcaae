"""Attention a few rows of queries at a time: which keys they may see, their logits, and their weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sharp.models.normalizer_gradients import GRADIENTS
from sharp.plugins.ops.torch_normalizers import Options, function_of

CHUNK = 2**19  # logits of one chunk: several arrays of this size are alive at once, 2 MiB each in float32


@dataclass(frozen=True)
class Chunk:
    """Some rows of queries, and the keys that any of them may see."""

    rows: slice
    keys: slice
    distance: Tensor  # key - query position [rows, keys]


@dataclass(frozen=True)
class ChunkedAttention:
    """Everything but query, key and value; `compute` is the dtype of logits and sums."""

    normalizer: str
    options: Options
    scale: float
    causal: bool
    window: int
    softcap: float
    alibi_slopes: Tensor | None
    mask: Tensor | None

    def chunks(self, query: Tensor, key: Tensor) -> Iterator[Chunk]:
        """The chunks in order; under a causal mask or a window the keys outside are left out."""
        queries, keys = query.shape[2], key.shape[2]
        rows = max(1, CHUNK // max(1, query.shape[0] * query.shape[1] * keys))
        before = keys - queries
        for start in range(0, queries, rows):
            end = min(start + rows, queries)
            directed = self.causal or self.window >= 0
            last = max(0, end + before) if directed else keys
            first = min(last, max(0, start + before + 1 - self.window)) if self.window >= 0 else 0
            index = torch.arange(first, last, device=query.device)
            query_positions = torch.arange(start + before, end + before, device=query.device)
            yield Chunk(slice(start, end), slice(first, last), index[None, :] - query_positions[:, None])

    def logits(self, products: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Of q k [batch, q_heads, rows, keys]: the logits, those before the position bias, and what is visible."""
        capped = products.mul_(self.scale)
        if self.softcap > 0:
            capped = self.softcap * torch.tanh(capped / self.softcap)
        logits, distance = capped, chunk.distance
        if self.alibi_slopes is not None:
            logits = logits - self.alibi_slopes[:, None, None].to(logits.dtype) * distance.abs()
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.causal or self.window >= 0:
            visible = distance <= 0
        if self.window >= 0:
            visible = visible & (distance > -self.window)
        if self.mask is not None:
            rows = chunk.rows if self.mask.shape[2] > 1 else slice(None)
            keys = chunk.keys if self.mask.shape[3] > 1 else slice(None)
            visible = visible & self.mask[:, :, rows, keys]
        visible = visible.expand(logits.shape)
        return logits.masked_fill(~visible, 0.0), capped, visible

    def weights(self, logits: Tensor, visible: Tensor) -> Tensor:
        """The weights of visible logits, of their shape."""
        return self.all_weights(logits, visible)[..., : logits.shape[-1]]

    def all_weights(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Those, and behind them the weight of the sink where heads have one."""
        if logits.shape[-1] == 0:
            return logits
        return function_of(self.normalizer)(logits, visible, self.options).masked_fill(
            ~self._beside(visible, True), 0.0
        )

    def gradients(
        self, logits: Tensor, visible: Tensor, weights: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of logits, the normalizer's own parameters and the sinks, from those of the keys' weights.

        `weights` are those of `all_weights`.
        """
        if logits.shape[-1] == 0:
            return logits, None, None
        compute, sinks = GRADIENTS[self.normalizer], self.options.sinks
        if sinks is None:
            return *compute(logits, visible, weights, gradient, self.options), None
        shown = sinks.to(logits.dtype).masked_fill(torch.isneginf(sinks), 0.0)[:, None, None]  # -inf has no weight
        d_all, d_own = compute(
            torch.cat([logits, shown.expand(*logits.shape[:-1], 1)], -1),
            self._beside(visible, True),
            weights,
            self._beside(gradient, 0.0),
            self.options,
        )
        return d_all[..., :-1], d_own, d_all[..., -1].sum((0, 2))

    def _beside(self, of_keys: Tensor, of_sink: float) -> Tensor:
        return of_keys if self.options.sinks is None else functional.pad(of_keys, (0, 1), value=of_sink)


def wide(tensor: Tensor) -> Tensor:
    """Float32, or float64 where it was that."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def by_key_head(tensor: Tensor, kv_heads: int) -> Tensor:
    """[batch, q_heads, rows, dim] -> [batch, kv_heads, group * rows, dim]: one product for all heads of a key head."""
    grouped: Tensor = tensor.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return grouped


def by_head(tensor: Tensor, q_heads: int) -> Tensor:
    """[batch, kv_heads, group * rows, dim] -> [batch, q_heads, rows, dim]."""
    heads: Tensor = tensor.unflatten(2, (q_heads // tensor.shape[1], -1)).flatten(1, 2)
    return heads
