"""`SharpForNumbers`, the decoder of `SharpForCausalLM` over real numbers instead of tokens."""

import torch
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.models.attention import AttentionFunction, EagerAttention
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.config import SharpConfig


class NumberEmbedding(nn.Module):
    """The embedding of a number as its product with one learned vector, W_enc of the SSA paper's appendix A.1."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(1, hidden_size) * hidden_size**-0.5)

    def forward(self, numbers: Tensor) -> Tensor:
        """Embed float numbers [batch, tokens] as [batch, tokens, hidden_size]."""
        return numbers.unsqueeze(-1) * self.direction


class SharpForNumbers(nn.Module):
    """A decoder of numbers with `config.vocab_size` outputs at each position: a prediction (W_dec), or class logits.

    Raises:
        InputError: the configuration ties input and output embeddings, which differ in kind here.
    """

    def __init__(self, config: SharpConfig) -> None:
        super().__init__()
        if config.tie_embeddings:
            raise InputError("tie_embeddings is True, but must be False for a model of numbers")
        self.config = config
        self.decoder = SharpForCausalLM(config)
        self.decoder.set_submodule("embedding", NumberEmbedding(config.hidden_size))

    def forward(self, numbers: Tensor, attention: AttentionFunction | None = None) -> Tensor:
        """Return outputs [batch, tokens, vocab_size] of numbers [batch, tokens], by `attention` or eager attention."""
        positions = torch.arange(numbers.shape[1], device=numbers.device).expand(numbers.shape)
        outputs: Tensor = self.decoder(numbers, positions, attention or EagerAttention(self.config))
        return outputs
