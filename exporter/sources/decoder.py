"""The decoder with pluggable attention. Every causal language model is brought into this form before lowering."""

from abc import abstractmethod

from torch import Tensor, nn

from sharp.core.manifest import HeadNorm, PositionScheme
from sharp.exporter.sources.head_parts import HeadPart, whole
from sharp.models.attention import AttentionFunction
from sharp.models.config import SharpConfig


class Decoder(nn.Module):
    """A decoder with pluggable attention; `config` says its shape and its norm.

    `logits` of `hidden_states` are the model's output. The decoder applies positions (RoPE) to query and key, and the
    learned length scale to the query, before it calls the attention of `hidden_states`. Subclasses set `config`,
    `positions` and `norm_name`.
    """

    config: SharpConfig
    positions: PositionScheme  # `config.positions`, or "learned", which `config` cannot say

    has_sinks = False  # whether any head has an attention sink
    routed = False  # whether each token chooses its experts; rounding may then choose other experts
    norm_name: str  # for people to read: `config.norm`, or one name for several norms

    def layer_parts(self, _layer: int) -> tuple[HeadPart, ...]:
        """Return one part for each attention node of a layer (from 0): its heads and its norm."""
        return whole(self.config)

    def head_norms(self) -> tuple[HeadNorm, ...]:
        """Return the manifest's entries for the heads whose norm is not `config.norm`; empty if there are none."""
        return ()

    @property
    def cache_heads(self) -> tuple[int, ...]:
        """The number of KV heads of each cache. Each attention node has a cache, in the order of the layers."""
        parts = [part for layer in range(self.config.layers) for part in self.layer_parts(layer)]
        return tuple(len(part.kv_heads) for part in parts)

    def first_cache(self, layer: int) -> int:
        """Return the index in `cache_heads` of the first cache of a layer (from 0)."""
        return sum(len(self.layer_parts(before)) for before in range(layer))

    @abstractmethod
    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Compute final hidden states [batch, tokens, hidden] of tokens and positions, both int64 [batch, tokens].

        `attention` is called for every layer.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., vocab] from hidden states [..., hidden]."""

    @abstractmethod
    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """Compute logits [batch, tokens, vocab] with the source's own code; None if that code lacks this norm."""
