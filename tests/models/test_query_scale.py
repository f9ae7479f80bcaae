"""The learned length scales by their formulas."""

import math

import pytest
import torch

from sharp.models.query_scale import QueryScale

HIDDEN, HEADS = 6, 4
every_head = torch.ones(HEADS, dtype=torch.bool)
positions = torch.tensor([[0, 1, 7, 4000]])
hidden = torch.randn(1, 4, HIDDEN, generator=torch.Generator().manual_seed(1))


def randomized(kind: str, heads: torch.Tensor = every_head) -> QueryScale:
    scale = QueryScale(kind, HIDDEN, heads, trained_context=512)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in scale.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return scale


def test_ssmax_is_s_times_log_length_plus_b():
    scale = randomized("length")
    expected = scale.s[1] * math.log(7 + 2) + scale.b[1]
    assert scale(hidden, positions)[0, 2, 1].item() == pytest.approx(expected.item(), rel=1e-5)


def test_ssmax_starts_as_plain_attention_at_the_trained_context():
    factor = QueryScale("length", HIDDEN, every_head, trained_context=512)(hidden[:, :1], torch.tensor([[511]]))
    torch.testing.assert_close(factor, torch.ones(1, 1, HEADS))


@pytest.mark.parametrize("kind", ["head", "token"])
def test_scale_is_delta_plus_beta_times_log_length_to_the_gamma(kind):
    scale = randomized(kind)
    for token, position in enumerate([0, 1, 7, 4000]):
        for head in range(HEADS):
            if kind == "head":
                beta_raw, gamma_raw = scale.beta_raw[head].item(), scale.gamma_raw[head].item()
            else:
                beta_raw = (scale.w_beta.weight[head] @ hidden[0, token]).item()
                gamma_raw = (scale.w_gamma.weight[head] @ hidden[0, token]).item()
            beta, gamma = math.log1p(math.exp(beta_raw)), 2 * math.tanh(gamma_raw)
            expected = 1 + beta * math.log(position + 2) ** gamma
            assert scale(hidden, positions)[0, token, head].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["length", "head", "token"])
def test_heads_that_are_not_scaled_have_the_factor_one(kind):
    factor = randomized(kind, torch.tensor([False, True, False, True]))(hidden, positions)
    assert (factor[..., ::2] == 1).all()
    assert (factor[..., 1::2] != 1).all()


@pytest.mark.parametrize("kind", ["head", "token"])
def test_a_fixed_gamma_leaves_only_beta_to_learn(kind):
    scale = QueryScale(kind, HIDDEN, every_head, trained_context=512, gamma=3.0)
    assert len(list(scale.parameters())) == 1
    with torch.no_grad():
        for parameter in scale.parameters():
            parameter.zero_()
    expected = 1 + math.log(2) * torch.log(positions + 2.0) ** 3  # softplus(0) = ln 2
    torch.testing.assert_close(scale(hidden, positions), expected[..., None].expand(-1, -1, HEADS))
