"""What a decoder says to a sequence in PyTorch: what the written model is compared with."""

import numpy as np
import torch

from sharp.exporter.decoder import Decoder
from sharp.exporter.verification import Answer, Floats, Tokens
from sharp.models.attention import EagerAttention
from sharp.models.normalizers import entropy


@torch.no_grad()
def torch_answer(decoder: Decoder, tokens: Tokens) -> Answer:
    """One uncached pass over int64 [tokens], in the decoder's precision.

    The logits are by the source's own code where it has the norm, or else by the one definition in `sharp.models`.
    """
    input_ids = torch.from_numpy(tokens)[None]
    attention = EagerAttention(decoder.config, record=True)
    hidden = decoder.hidden_states(input_ids, torch.arange(len(tokens))[None], attention)
    logits = decoder.own_logits(input_ids)
    if logits is None:
        logits = decoder.logits(hidden)
    entropies = torch.stack([entropy(weights)[0].T for weights in attention.weights])  # [layers, tokens, q_heads]
    return Answer(logits[0].numpy(), entropies.numpy())


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
