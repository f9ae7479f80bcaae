"""Qwen3 with gated attention, as the authors of Qiu et al. (2025, arXiv:2505.06708) publish it.

The output of each head is multiplied by sigmoid(gate) before the output projection. The gates, one per head or one per
channel, are rows of `q_proj`. Checkpoints have the `model_type` of Qwen3, but transformers' Qwen3 has no gates.

Source: modeling_qwen3.py of qiuzh20/gated_attention at 49645df. Families with a `model_type` of their own, such as
Qwen3-Next, have gates in transformers' classes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb, eager_attention_forward

from sharp.core.errors import InputError

GATES = ("headwise_attn_output_gate", "elementwise_attn_output_gate")
KEYS = (*GATES, "use_qk_norm", "qkv_bias", "attention_bias")


def has_gates(facts: PreTrainedConfig) -> bool:
    """Whether `facts` are the configuration of a Qwen3 by the code of gated attention, also of one without gates."""
    return facts.model_type == "qwen3" and any(hasattr(facts, name) for name in GATES)


def prepare(facts: PreTrainedConfig, where: str) -> None:
    """Set, in place, `attention_bias` to `qkv_bias`, the key that the authors' code reads in its place.

    Raises:
        InputError: a key of the authors' code is not true or false; `where` names the folder.
    """
    for name in KEYS:
        value = getattr(facts, name, False)
        if not isinstance(value, bool):
            raise InputError(f"{where} has {name} {value!r}, but it must be true or false; correct config.json")
    facts.attention_bias = getattr(facts, "qkv_bias", facts.attention_bias)


class GatedQwen3Attention(Qwen3Attention):
    """Attention of Qwen3 whose output is multiplied by a gate per head, a gate per channel, or nothing.

    `q_proj` has the rows of each group of heads that share a KV head together: the queries, then the gates.
    """

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        headwise, elementwise = (getattr(config, name, False) for name in GATES)
        self.gates = 1 if headwise else self.head_dim if elementwise else 0  # of each head
        rows = config.num_attention_heads * (self.head_dim + self.gates)
        self.q_proj = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)
        if not getattr(config, "use_qk_norm", True):
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()  # type: ignore[assignment] # declared as norms

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer's attention for `hidden_states` [batch, tokens, hidden_size], as transformers' Qwen3 does.

        Returns:
            The output [batch, tokens, hidden_size], and the weights if the attention implementation returns them.
        """
        shape = hidden_states.shape[:-1]
        group = self.num_key_value_groups
        projected = self.q_proj(hidden_states).unflatten(-1, (-1, group * (self.head_dim + self.gates)))
        query, gate = projected.split([group * self.head_dim, group * self.gates], dim=-1)
        query = self.q_norm(query.reshape(*shape, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(*shape, -1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )  # [batch, tokens, heads, head_dim]
        if self.gates:
            output = output * torch.sigmoid(gate.reshape(*shape, -1, self.gates))
        return self.o_proj(output.flatten(2)), weights


class GatedQwen3ForCausalLM(Qwen3ForCausalLM):
    """transformers' Qwen3 with the gates that `has_gates` finds in its configuration."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = GatedQwen3Attention(config, index)

    @classmethod
    def from_config(cls, config: Qwen3Config, **making: Any) -> "GatedQwen3ForCausalLM":
        """Make a model with random weights, as `AutoModelForCausalLM.from_config` does."""
        made: GatedQwen3ForCausalLM = cls._from_config(config, **making)  # type: ignore[no-untyped-call]
        return made
