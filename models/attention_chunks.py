"""Attention in chunks of a few rows of queries: the keys that a chunk may see, its logits, and its weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sharp.models.normalizer_gradients import GRADIENTS
from sharp.plugins.op.torch_normalizers import NormalizerOptions, function_of

CHUNK = 2**19  # logits of one chunk; several arrays of this size exist at once, 2 MiB each in float32


@dataclass(frozen=True)
class QueryChunk:
    """Some rows of queries, and the range of keys that at least one of the rows may see."""

    rows: slice
    keys: slice
    distance: Tensor  # key - query position [rows, keys]


@dataclass(frozen=True)
class ChunkedAttention:
    """The arguments of attention except query, key and value, and the steps of its computation.

    `normalizer` is a name of the op's normalizers or a user's. The other fields are described at
    `sharp.models.normalized_attention.normalized_attention`; a softcap of 0 and a window of -1 are off.
    """

    normalizer: str
    options: NormalizerOptions
    scale: float
    causal: bool
    window: int
    softcap: float
    alibi_slopes: Tensor | None
    mask: Tensor | None

    def is_plain(self, query: Tensor, key: Tensor) -> bool:
        """Whether logits are just scaled products, with a causal mask over equal lengths or `mask`, or no mask."""
        nothing_else = self.alibi_slopes is None and self.options.sinks is None
        shown = self.mask is None and query.shape[2] == key.shape[2] if self.causal else True
        return nothing_else and self.softcap == 0 and self.window < 0 and shown and min(query.numel(), key.numel()) > 0

    def chunks(self, query: Tensor, key: Tensor) -> Iterator[QueryChunk]:
        """Yield the chunks of `query` [batch, q_heads, queries, dim] over `key` [batch, kv_heads, keys, dim], in order.

        Keys that a causal mask or a window hides from all rows of a chunk are left out. Queries are at the last
        positions.
        """
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
            yield QueryChunk(slice(start, end), slice(first, last), index[None, :] - query_positions[:, None])

    def logits(self, products: Tensor, chunk: QueryChunk) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, logits before the position bias, and which logits are visible.

        `products` q k [batch, q_heads, rows, keys] are overwritten.
        """
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
        """Return the weights of the logits, in the same shape, 0 where a key is not visible."""
        return self.all_weights(logits, visible)[..., : logits.shape[-1]]

    def all_weights(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Return the weights of the logits, 0 for keys that are not visible, and last the sink's if there are sinks."""
        if logits.shape[-1] == 0:
            return logits
        return function_of(self.normalizer)(logits, visible, self.options).masked_fill(
            ~self._beside(visible, True), 0.0
        )

    def gradients(
        self, logits: Tensor, visible: Tensor, weights: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of logits, the normalizer's own parameters and sinks, given those of the keys' weights.

        `weights` are the result of `all_weights` for `logits` and `visible`, which are those of `logits()`. `gradient`
        is shaped as `logits`. The gradients of parameters [q_heads, P] and sinks [q_heads] are None if there are none.

        Raises:
            KeyError: the normalizer is a user's, which has no written gradient.
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
        """Append the column `of_sink` to values [..., keys] if there are sinks, else return them unchanged."""
        return of_keys if self.options.sinks is None else functional.pad(of_keys, (0, 1), value=of_sink)


def wide(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is float64; without a copy if it is either already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def by_key_head(tensor: Tensor, kv_heads: int) -> Tensor:
    """Fold query heads into rows, so that all heads of a KV head take part in one product.

    [batch, q_heads, rows, dim] -> [batch, kv_heads, group * rows, dim].
    """
    grouped: Tensor = tensor.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return grouped


def by_head(tensor: Tensor, q_heads: int) -> Tensor:
    """Unfold the rows of `by_key_head`: [batch, kv_heads, group * rows, dim] -> [batch, q_heads, rows, dim]."""
    heads: Tensor = tensor.unflatten(2, (q_heads // tensor.shape[1], -1)).flatten(1, 2)
    return heads
