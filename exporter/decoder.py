"""The form that every checkpoint is brought into before it is lowered: a decoder with pluggable attention."""

from abc import abstractmethod

from torch import Tensor, nn

from sharp.models.attention import AttentionFunction
from sharp.models.config import SharpConfig
from sharp.plugins.manifest import PositionScheme


class Decoder(nn.Module):
    """A decoder seen through two verbs; `config` says its shape and its norm.

    The query that reaches `attention` carries positions (RoPE) and the learned length scale already.
    """

    config: SharpConfig
    positions: PositionScheme  # of `config`, except for learned ones, which our own models do not have

    @abstractmethod
    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Tokens int64 [batch, tokens] at positions of that shape -> final hidden states [batch, tokens, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] -> logits [..., vocab]."""

    @abstractmethod
    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """Logits [batch, tokens, vocab] of whole sequences by the source's own code; None where it lacks this norm."""
