"""Differential attention (Ye et al. 2025, arXiv:2410.05258) of DiffLlama, as one call of the attention op per layer.

The first half of a layer's query heads makes one attention map, the second half the other, and both maps weigh the same
values, which have two channels groups of head_dim. The output of a pair of heads is first - lambda * second.
transformers computes each group of channels in a call of its own, with the same queries and keys. One call with values
of 2 * head_dim channels is the same, and has the weights of every head, and so their statistics, once.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, apply_rotary_pos_emb

OURS = "sharp"  # the beginning of the names of Sharp's attention implementations


class JoinedDifferentialAttention(DiffLlamaAttention):
    """DiffLlama's attention with one call per layer under Sharp's attention implementations.

    transformers' own implementations are called as transformers does, so that the two can be compared.
    """

    def forward(  # type: ignore[override] # transformers declares that there are always weights
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer's attention for `hidden_states` [batch, tokens, hidden_size].

        Returns:
            The output [batch, tokens, hidden_size], and the weights if the attention implementation returns them.
        """
        implementation = self.config._attn_implementation or ""
        if not implementation.startswith(OURS):
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        shape = hidden_states.shape[:-1]
        query, key, value = (
            projection(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        value = torch.cat(value.chunk(2, dim=1), dim=-1).repeat(1, 2, 1, 1)  # [batch, kv_heads, tokens, 2 * head_dim]
        attend = ALL_ATTENTION_FUNCTIONS[implementation]
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )  # [batch, tokens, q_heads, 2 * head_dim]
        first, second = output.chunk(2, dim=2)
        plus, minus = (
            torch.exp(torch.sum(one * other, dim=-1))
            for one, other in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        )
        difference = first - (plus - minus + self.lambda_init) * second
        joined: Tensor = (1 - self.lambda_init) * self.groupnorm(difference)
        return self.o_proj(joined.flatten(2)), weights


def join_calls(model: PreTrainedModel) -> None:
    """Make every differential attention of `model` call Sharp's attention once per layer, in place."""
    for module in model.modules():
        if type(module) is DiffLlamaAttention:
            module.__class__ = JoinedDifferentialAttention
