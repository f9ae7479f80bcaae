"""Modules that torch traces slowly: entmax by bisection, and block masks of flex_attention."""

from functools import partial

import entmax
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sharp.core.errors import InputError
from sharp.exporter.programs.decoder import ProgramDecoder
from tests.exporter.programs import gpt
from tests.exporter.programs.test_recognition import TOKENS, read


def flexible(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    def capped(score: Tensor, *_index: Tensor) -> Tensor:
        return 5 * torch.tanh(score / 5)

    tokens = query.shape[2]
    mask = create_block_mask(lambda _b, _h, i, j: (i >= j) & (i - j < 20), None, None, tokens, tokens, device="cpu")
    return flex_attention(query, key, value, score_mod=capped, block_mask=mask, enable_gqa=True)


def test_a_block_mask_is_a_sliding_window() -> None:
    source = read(gpt.GPT(flexible), TOKENS)
    assert isinstance(source.model, ProgramDecoder)
    found = source.model.attention.first.logits
    assert (found.softcap, found.causal, found.window) == (pytest.approx(5), True, 20)
    assert source.no_cache is None


def test_entmax_by_bisection_says_its_alpha() -> None:
    bisected = partial(entmax.entmax_bisect, alpha=1.3, n_iter=25)
    source = read(gpt.GPT(gpt.with_weights(bisected)), TOKENS, norm=None)
    assert (source.model.config.norm, source.model.config.alpha, source.no_cache) == ("entmax", 1.3, None)


def test_an_alpha_for_every_head_is_refused() -> None:
    alphas = torch.tensor([1.3, 1.4, 1.5, 1.6])[:, None, None]
    with pytest.raises(InputError, match=r"alpha differs by head, from 1\.3 to 1\.6"):
        read(gpt.GPT(gpt.with_weights(partial(entmax.entmax_bisect, alpha=alphas, n_iter=25))), TOKENS)
