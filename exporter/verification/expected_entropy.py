"""The entropies of a decoder's heads in PyTorch, with which a server compares the entropies that it measures."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sharp.core.manifest import ExpectedEntropy
from sharp.exporter.sources.decoder import Decoder
from sharp.models.attention import DEFAULT_OPTIONS, EagerAttention, LayerOptions
from sharp.plugins.op.torch_normalizers import entropy

# More tokens make the pass in PyTorch longer. It holds the attention weights of one layer at a time, which take 4 bytes
# per head and pair of tokens.
MOST_TOKENS = 512
FIRST_BOUND = 64  # contexts of up to 32 keys are left out, because nearly all their keys get weight in any head
DIGITS = 4


class _Entropies(EagerAttention):
    """Attention that keeps the entropies of every layer [tokens, q_heads], but not the attention weights."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.config, record=True)
        self.entropies: list[Tensor] = []

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
    ) -> Tensor:
        """Compute the attention of a layer as an `AttentionFunction`, and keep the entropies of its heads."""
        result = super().__call__(layer, query, key, value, head_params, alibi_slopes, options)
        self.entropies.append(entropy(self.weights.pop())[0].T.double())
        return result


@torch.no_grad()
def expected_entropy(decoder: Decoder, text: str, tokens: Tensor, windows: Sequence[int]) -> ExpectedEntropy | None:
    """Return the mean H / ln n of every head over the first tokens of a text, by context length.

    H is the entropy in nats of a query's weights, n the number of keys that the query sees.

    Args:
        decoder: the model that was exported.
        text: the name of the text.
        tokens: the text's tokens, int64 [tokens]; at most `MOST_TOKENS`, and at most the model's context, are read.
        windows: the most keys that a query of each layer sees; empty if every layer sees all keys.

    Returns:
        The means, or None if no more than 32 tokens are read or an entropy is not finite.
    """
    tokens = tokens[: min(MOST_TOKENS, decoder.config.max_context)]
    context = torch.arange(1, len(tokens) + 1)
    bounds = [FIRST_BOUND]
    while bounds[-1] < len(tokens):
        bounds.append(2 * bounds[-1])
    chosen = [(context > bound // 2) & (context <= bound) for bound in bounds]
    if not chosen[0].any():
        return None
    attention = _Entropies(decoder)
    decoder.hidden_states(tokens[None], torch.arange(len(tokens))[None], attention)
    entropies = torch.stack(attention.entropies)  # [layers, tokens, q_heads]
    widest = torch.tensor(list(windows) or [len(tokens)] * len(entropies))
    visible = torch.minimum(context[None], widest[:, None])  # [layers, tokens]
    normalized = entropies / visible.clamp(min=2).log()[..., None]
    means = torch.stack([normalized[:, mask].mean(1) for mask in chosen], -1)  # [layers, q_heads, ranges]
    if not means.isfinite().all():
        return None
    return ExpectedEntropy(
        text=text,
        contexts=tuple(bounds),
        tokens=tuple(int(mask.sum()) for mask in chosen),
        normalized_entropy=tuple(
            tuple(tuple(round(value, DIGITS) for value in head) for head in layer) for layer in means.tolist()
        ),
    )
