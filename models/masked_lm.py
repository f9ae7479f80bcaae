"""`SharpForMaskedLM`, the encoder, in which every token sees every token that is not padding.

BabyBERTa (Huebner et al. 2021), the model of the SSA paper's encoder experiments, is a small RoBERTa that is trained to
predict masked words. `SharpForMaskedLM` has the task of BabyBERTa but the blocks of our decoder: RMSNorm before each
part, SwiGLU, no dropout, and one of our position schemes instead of learned embeddings.
"""

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models.attention import AttentionFunction, EagerAttention
from sharp.models.config import SharpConfig
from sharp.models.transformer import Transformer


class SharpForMaskedLM(Transformer):
    """A bidirectional model that predicts the token at every position.

    Length scales grow with the number n of tokens that are not padding, which is the same for all tokens of a sequence.

    Raises:
        InputError: `config` describes a decoder.
    """

    def __init__(self, config: SharpConfig) -> None:
        if config.causal:
            raise InputError("causal is true, so this is a decoder; use SharpForCausalLM, or set causal to false")
        super().__init__(config)

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, attention: AttentionFunction | None = None
    ) -> Tensor:
        """Return the hidden states [batch, tokens, hidden_size] after the last norm, which `lm_head` turns into logits.

        Args:
            input_ids: int64 [batch, tokens].
            attention_mask: bool or int [batch, tokens], 0 at padding, which changes no other token; None: no padding.
            attention: replaces the eager attention; it must hide padding itself.
        """
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        if attention is None:
            attention = EagerAttention(self.config, attention_mask=attention_mask)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        last_visible = (kept.sum(-1, keepdim=True) - 1).clamp(min=0).expand_as(input_ids)
        return self.last_hidden(input_ids, positions, last_visible, attention)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, attention: AttentionFunction | None = None
    ) -> Tensor:
        """Return logits [batch, tokens, vocab_size], which are meaningless at padding.

        The arguments are those of `hidden_states`. `input_ids` are int64 [batch, tokens], and the mask is 0 at padding.
        """
        logits: Tensor = self.lm_head(self.hidden_states(input_ids, attention_mask, attention))
        return logits
