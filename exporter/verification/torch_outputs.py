"""What a decoder says to a sequence in PyTorch: what the written model is compared with."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.verification.comparison import CaseOutputs, Floats, Tokens
from sharp.models.attention import EagerAttention
from sharp.plugins.ops.torch_normalizers import entropy


@torch.no_grad()
def torch_case_outputs(decoder: Decoder, tokens: Tokens) -> CaseOutputs:
    """One uncached pass over int64 [tokens], in the decoder's precision.

    The logits are by the source's own code where it has the norm, or else by the one definition in `sharp.models`.
    """
    input_ids = torch.from_numpy(tokens)[None]
    attention = EagerAttention(decoder.config, record=True)
    keys: list[Floats] = []
    values: list[Floats] = []

    def recorded(layer: int, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        for part in decoder.layer_parts(layer):  # one cache each
            keys.append(key[0, :, list(part.kv_heads)].numpy())
            values.append(value[0, :, list(part.kv_heads)].numpy())
        return attention(layer, query, key, value, *rest)

    hidden = decoder.hidden_states(input_ids, torch.arange(len(tokens))[None], recorded)
    logits = decoder.own_logits(input_ids)
    if logits is None:
        logits = decoder.logits(hidden)
    entropies = torch.stack([entropy(weights)[0].T for weights in attention.weights])  # [layers, tokens, q_heads]
    return CaseOutputs(logits[0].numpy(), entropies.numpy(), tuple(keys), tuple(values))


@torch.no_grad()
def torch_logits(decoder: Decoder, tokens: Tokens) -> Floats:
    """The logits [tokens, vocab] alone."""
    input_ids = torch.from_numpy(tokens)[None]
    logits = decoder.own_logits(input_ids)
    if logits is None:
        positions = torch.arange(len(tokens))[None]
        logits = decoder.logits(decoder.hidden_states(input_ids, positions, EagerAttention(decoder.config)))
    found: Floats = np.asarray(logits[0].numpy(), np.float32)
    return found
