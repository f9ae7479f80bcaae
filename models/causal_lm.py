"""`SharpForCausalLM`, a decoder of the Llama family whose attention can use any normalizer.

The attention itself is a callable that the caller may replace: `EagerAttention` over contiguous sequences here, the
paged op when the exporter traces the model.
"""

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models.attention import AttentionFunction, EagerAttention
from sharp.models.config import SharpConfig
from sharp.models.transformer import Transformer


class SharpForCausalLM(Transformer):
    """A causal language model, whose shape is defined by `config`.

    Raises:
        InputError: `config` describes an encoder.
    """

    def __init__(self, config: SharpConfig) -> None:
        if not config.causal:
            raise InputError("causal is false, so this is an encoder; use SharpForMaskedLM")
        super().__init__(config)

    def hidden_states(
        self, input_ids: Tensor, positions: Tensor | None = None, attention: AttentionFunction | None = None
    ) -> Tensor:
        """Return the hidden states [batch, tokens, hidden_size] after the last norm, which `lm_head` turns into logits.

        Args:
            input_ids: int64 [batch, tokens].
            positions: int64 [batch, tokens], 0-based; 0, 1, 2 ... if None.
            attention: replaces the eager attention over contiguous sequences.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if attention is None:
            attention = EagerAttention(self.config)
        return self.last_hidden(input_ids, positions, positions, attention)

    def forward(
        self, input_ids: Tensor, positions: Tensor | None = None, attention: AttentionFunction | None = None
    ) -> Tensor:
        """Return logits [batch, tokens, vocab_size]; the arguments are those of `hidden_states`.

        `input_ids` and `positions` are int64 [batch, tokens]; positions are 0, 1, ... if None. `attention` None is
        eager attention.
        """
        logits: Tensor = self.lm_head(self.hidden_states(input_ids, positions, attention))
        return logits
