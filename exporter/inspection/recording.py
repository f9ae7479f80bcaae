"""Records of a model's attention during one pass over a text, in the same form for folders and checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sharp.plugins.op.normalizers import Normalizer

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]
Inputs = Tokens | Floats

# Columns of a model's `stats` output.
ENTROPY, SUPPORT, INVERSE_TEMPERATURE, LOGIT_SPREAD, SINK_MASS = range(5)


@dataclass(frozen=True)
class Projections:
    """The matrices Q and K of all heads of a layer, and the input that they were applied to.

    `hidden` [tokens, hidden_size] is the attention block's input, `query_weight` is [q_heads, head_dim, hidden_size],
    `key_weight` is [kv_heads, head_dim, hidden_size].
    """

    hidden: Floats
    query_weight: Floats
    key_weight: Floats


@dataclass(frozen=True)
class LayerRecord:
    """The inputs and statistics of one attention node in one pass over the text.

    Attributes:
        query: [tokens, q_heads, head_dim], positions and length scales already applied.
        key: [tokens, kv_heads, head_dim].
        head_params: [q_heads, P], the normalizer's learned parameters of each head and its sink, as the op takes them.
        alibi_slopes: [q_heads].
        normalizer: the normalizer that turns logits into weights.
        scale: the factor of query . key.
        softcap: the cap of the logits; 0 is off.
        window: the most keys that a query sees; -1 is off.
        projections: the matrices of Q and K; None if they were not found in the model.
        stats: [tokens, q_heads, 4 or 5], the op's statistics; the inverse temperature includes the length scale.
        length_scale: [tokens, q_heads], the factor by which a learned length scale has multiplied the query; None if
            the norm has no length scale.
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
    """An opened model.

    `record` runs the model once over its inputs and returns a record per layer. `numbers_of_item` says which inputs:
    None for token ids int64 [tokens], 0 for numbers float32 [tokens], else the width of a set's items float32
    [items, width]. `max_context` and `trained_context` count tokens, numbers or items. `tokenizer` is None if the model
    has none.
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
        """The name of the elements that the model reads: token, item or number."""
        return "token" if self.numbers_of_item is None else "item" if self.numbers_of_item else "number"
