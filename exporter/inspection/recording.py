"""What a model's attention was given and did while it read one text: the same for folders and checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sharp.plugins.ops.normalizers import Normalizer

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]
Inputs = Tokens | Floats

# Columns of a model's `stats` output.
ENTROPY, SUPPORT, INVERSE_TEMPERATURE, LOGIT_SPREAD, SINK_MASS = range(5)


@dataclass(frozen=True)
class Projections:
    """The matrices Q and K of all heads of a layer, and what they were applied to.

    hidden [tokens, hidden_size] is the attention block's input; query_weight [q_heads, head_dim, hidden_size],
    key_weight [kv_heads, head_dim, hidden_size].
    """

    hidden: Floats
    query_weight: Floats
    key_weight: Floats


@dataclass(frozen=True)
class LayerRecord:
    """One attention node and one pass over the text.

    Attributes:
        query: [tokens, q_heads, head_dim], positions and length scales already applied.
        key: [tokens, kv_heads, head_dim].
        head_params: [q_heads, P], the normalizer's learned parameters per head and their sinks, as the op's.
        alibi_slopes: [q_heads].
        normalizer: what turns logits into weights.
        scale: factor of query . key.
        softcap: of the logits; 0 is off.
        window: how many keys a query sees at most; -1 is off.
        projections: None where Q and K could not be told apart from the rest of the model.
        stats: [tokens, q_heads, 4 or 5], the op's statistics, the inverse temperature times the learned length scale.
        length_scale: [tokens, q_heads], the factor that a learned length scale has put into the query; None where the
            norm has none.
    """

    query: Floats
    key: Floats
    head_params: Floats | None
    alibi_slopes: Floats | None
    normalizer: Normalizer
    scale: float
    softcap: float
    window: int
    projections: Projections | None
    stats: Floats
    length_scale: Floats | None = None


@dataclass(frozen=True)
class InspectedModel:
    """A model that was opened.

    `record` runs it once over token ids [tokens] and returns a record per layer. `numbers_of_item` is for models that
    read no tokens: 0 where they read numbers [tokens], else the width of a set's items [items, width].
    """

    name: str
    norm: str
    layers: int
    q_heads: int
    vocab_size: int
    max_context: int
    trained_context: int
    tokenizer: Tokenizer | None
    record: Callable[[Inputs], tuple[LayerRecord, ...]]
    numbers_of_item: int | None = None

    @property
    def unit(self) -> str:
        """What it reads one after the other."""
        return "token" if self.numbers_of_item is None else "item" if self.numbers_of_item else "number"
