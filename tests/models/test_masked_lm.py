"""`SharpForMaskedLM`: every token sees every other, padding changes nothing, and positions have their effect."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from sharp.core.errors import InputError
from sharp.models.attention import EagerAttention
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.config import Positions, SharpConfig
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.norms import NORMS
from sharp.models.query_scale import QueryScale

TINY = SharpConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    positions="nape",
    causal=False,
    trained_context=32,
    max_context=256,
)
POSITIONS = get_args(Positions)


def tiny(**changes) -> SharpForMaskedLM:
    """Return a model whose weights are so large that attention is far from uniform."""
    torch.manual_seed(0)
    model = SharpForMaskedLM(replace(TINY, **{"alpha": 0.0, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_the_first_token_depends_on_the_others(norm, positions):
    model = tiny(norm=norm, positions=positions)
    before = tokens(2, 9)
    after = before.clone()
    after[:, 1:] = (after[:, 1:] + 7) % TINY.vocab_size
    assert not torch.allclose(model(before)[:, 0], model(after)[:, 0], atol=1e-3)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_padding_changes_no_other_token(norm, positions):
    model = tiny(norm=norm, positions=positions)
    sentence = tokens(1, 7)
    alone = model(sentence)
    for left, right in ((0, 4), (3, 0), (2, 5)):
        padded = torch.full((1, left + 7 + right), 3)
        padded[:, left : left + 7] = sentence
        mask = torch.zeros(1, left + 7 + right, dtype=torch.int64)
        mask[:, left : left + 7] = 1
        batch = torch.cat([padded, tokens(1, left + 7 + right)])
        masks = torch.cat([mask, torch.ones_like(mask)])
        found = model(batch, masks)[:1, left : left + 7]
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_softmax_without_positions_is_pytorchs_attention():
    model = tiny(norm="softmax", positions="none")

    def attention(layer, query, key, value, head_params, slopes, _options):
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return mixed.transpose(1, 2)

    input_ids = tokens(2, 9)
    torch.testing.assert_close(model(input_ids), model(input_ids, attention=attention), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_alibi_falls_off_to_both_sides_alike():
    attention = EagerAttention(replace(TINY, positions="alibi"), record=True)
    query = torch.zeros(1, 4, 4, 8)
    attention(0, query, query[:, :, :2], query[:, :, :2], None, torch.tensor([1.0, 0.5, 0.25, 0.0]))
    biases = torch.tensor([-1.0, 0.0, -1.0, -2.0]) * torch.tensor([1.0, 0.5, 0.25, 0.0]).unsqueeze(-1)
    torch.testing.assert_close(attention.weights[0][0, :, 1], biases.softmax(-1))


@pytest.mark.parametrize("positions", POSITIONS)
@torch.no_grad()
def test_only_rope_tells_a_text_from_the_same_text_backwards(positions):
    model = tiny(positions=positions)
    input_ids = tokens(1, 9)
    backwards = model(input_ids.flip(1)).flip(1)
    assert torch.allclose(model(input_ids), backwards, atol=1e-3) == (positions != "rope")


@torch.no_grad()
def test_length_scales_grow_with_the_number_of_tokens_that_are_not_padding(monkeypatch):
    lengths = []
    forward = QueryScale.forward
    monkeypatch.setattr(
        QueryScale, "forward", lambda self, hidden, seen: lengths.append(seen) or forward(self, hidden, seen)
    )
    tiny(norm="asentmax")(tokens(2, 4), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]))
    assert lengths[0].tolist() == [[2] * 4, [3] * 4]  # one less than the number of keys that each token sees


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_trains_all_its_parameters(norm):
    model = tiny(norm=norm)
    mask = torch.ones(2, 9)
    mask[0, 6:] = 0
    model(tokens(2, 9), mask)[mask.bool()].square().mean().backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # the constants of log-power and llama4 are not trained
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_encoder_and_decoder_are_not_taken_for_each_other():
    with pytest.raises(InputError, match="SharpForMaskedLM"):
        SharpForCausalLM(TINY)
    with pytest.raises(InputError, match="SharpForCausalLM"):
        SharpForMaskedLM(replace(TINY, causal=True))
