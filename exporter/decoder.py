"""The form that every checkpoint is brought into before it is lowered: a decoder with pluggable attention."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sharp.models.attention import AttentionFunction
from sharp.models.config import SharpConfig


class Decoder(nn.Module):
    """A decoder seen through two verbs; `config` says its shape and its norm.

    The query that reaches `attention` carries positions (RoPE) and the learned length scale already.
    """

    config: SharpConfig

    def configure(self, **changes: Any) -> None:
        """Change fields of the configuration that no weight depends on: the temperatures."""
        self.config = replace(self.config, **changes)

    @abstractmethod
    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Tokens int64 [1, tokens] at positions int64 [1, tokens] -> final hidden states [1, tokens, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] -> logits [..., vocab]."""

    @abstractmethod
    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """Logits [1, tokens, vocab] of one sequence by the source's own code; None where it lacks this norm."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that was read: the decoder, and what goes beside it into the model folder."""

    name: str
    architecture: str
    sha256: str
    decoder: Decoder
    trained: bool  # the checkpoint was trained with the norm that the decoder now has
    write_tokenizer: Callable[[Path], object] | None
