"""`SharpForNumbers`: the decoder of `SharpForCausalLM` over real numbers instead of tokens."""

import torch
from torch import Tensor, nn

from sharp.models.attention import AttentionFunction, EagerAttention
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.config import SharpConfig
from sharp.plugins.errors import InputError


class NumberEmbedding(nn.Module):
    """A number times one learned vector: the W_enc of the SSA paper's appendix A.1."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(1, hidden_size) * hidden_size**-0.5)

    def forward(self, numbers: Tensor) -> Tensor:
        """[batch, tokens] -> [batch, tokens, hidden_size]."""
        return numbers.unsqueeze(-1) * self.direction


class SharpForNumbers(nn.Module):
    """Reads a sequence of numbers, says `config.vocab_size` numbers at each: a prediction (W_dec), or class logits.

    Raises:
        InputError: the configuration ties the embeddings, which have nothing in common here.
    """

    def __init__(self, config: SharpConfig) -> None:
        super().__init__()
        if config.tie_embeddings:
            raise InputError("tie_embeddings is True, but must be False for a model of numbers")
        self.config = config
        self.decoder = SharpForCausalLM(config)
        self.decoder.set_submodule("embedding", NumberEmbedding(config.hidden_size))

    def forward(self, numbers: Tensor, attention: AttentionFunction | None = None) -> Tensor:
        """[batch, tokens] -> [batch, tokens, vocab_size]; `attention` replaces the eager one."""
        positions = torch.arange(numbers.shape[1], device=numbers.device).expand(numbers.shape)
        outputs: Tensor = self.decoder(numbers, positions, attention or EagerAttention(self.config))
        return outputs
