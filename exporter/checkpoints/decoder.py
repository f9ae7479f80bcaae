"""The form that every checkpoint is brought into before it is lowered: a decoder with pluggable attention."""

from abc import abstractmethod

from torch import Tensor, nn

from sharp.exporter.graph.head_parts import Part, whole
from sharp.models.attention import AttentionFunction
from sharp.models.config import SharpConfig
from sharp.plugins.manifest import PositionScheme


class Decoder(nn.Module):
    """A decoder seen through two verbs; `config` says its shape and its norm.

    The query that reaches `attention` carries positions (RoPE) and the learned length scale already.
    """

    config: SharpConfig
    positions: PositionScheme  # of `config`, except for learned ones, which our own models do not have

    has_sinks = False  # of any head
    routed = False  # each token chooses its experts, so that rounding may choose others
    norm_name: str  # for people: that of `config`, or a name for several

    def layer_parts(self, _layer: int) -> tuple[Part, ...]:
        """What the attention nodes of a layer compute."""
        return whole(self.config)

    @property
    def cache_heads(self) -> tuple[int, ...]:
        """The KV heads of every cache: each attention node has one, in the order of the layers."""
        parts = [part for layer in range(self.config.layers) for part in self.layer_parts(layer)]
        return tuple(len(part.kv_heads) for part in parts)

    def first_cache(self, layer: int) -> int:
        """The number of the first cache of a layer."""
        return sum(len(self.layer_parts(before)) for before in range(layer))

    @abstractmethod
    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Tokens int64 [batch, tokens] at positions of that shape -> final hidden states [batch, tokens, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] -> logits [..., vocab]."""

    @abstractmethod
    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """Logits [batch, tokens, vocab] of whole sequences by the source's own code; None where it lacks this norm."""
