"""`SharpForMaskedLM`: the encoder, in which every token sees every token that is not padding.

BabyBERTa (Huebner et al. 2021), the model of the SSA paper's encoder experiments, is a small RoBERTa that is trained to
name masked words. This has its task and its sizes (`babyberta_config`) on the blocks of our decoder: RMSNorm before
each part, SwiGLU, no dropout, and one of our position schemes in place of learned position embeddings.
"""

import torch
from torch import Tensor

from sharp.models.attention import AttentionFunction, EagerAttention
from sharp.models.config import Positions, SharpConfig
from sharp.models.transformer import Transformer
from sharp.plugins.errors import InputError


class SharpForMaskedLM(Transformer):
    """A bidirectional model that predicts the token at every position.

    The n that length scales grow with is the number of tokens that are not padding, the same for all of a sequence.

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
        """What `lm_head` turns into logits: [batch, tokens, hidden_size], after the last norm.

        Args:
            input_ids: int64 [batch, tokens].
            attention_mask: bool or int [batch, tokens], 0 at padding, which changes no other token; none if None.
            attention: replaces the eager attention; it has to leave padding out itself.
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
        """Logits [batch, tokens, vocab_size], those at padding without meaning; see `hidden_states`."""
        logits: Tensor = self.lm_head(self.hidden_states(input_ids, attention_mask, attention))
        return logits


def babyberta_config(vocab_size: int = 8192, norm: str = "softmax", positions: Positions = "rope") -> SharpConfig:
    """BabyBERTa's sizes: 8 layers of 8 heads, 256 channels, sequences of up to 128 tokens."""
    return SharpConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=1024,
        layers=8,
        q_heads=8,
        kv_heads=8,
        head_dim=32,
        norm=norm,
        positions=positions,
        causal=False,
        trained_context=128,
        max_context=128,
    )
