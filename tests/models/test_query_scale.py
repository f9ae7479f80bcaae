"""The learned length scales agree with their formulas."""

import math

import pytest
import torch

from sharp.models.query_scale import QueryScale

HIDDEN, HEADS = 6, 4
every_head = (True,) * HEADS
positions = torch.tensor([[0, 1, 7, 4000]])
hidden = torch.randn(1, 4, HIDDEN, generator=torch.Generator().manual_seed(1))


def randomized(kind: str, heads: tuple[bool, ...] = every_head) -> QueryScale:
    scale = QueryScale(kind, HIDDEN, heads, trained_context=512)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in scale.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return scale


def test_ssmax_is_s_times_log_length():
    scale = randomized("length")
    assert [name for name, _ in scale.named_parameters()] == ["s"]
    assert scale(hidden, positions)[0, 2, 1].item() == pytest.approx(scale.s[1].item() * math.log(7 + 2), rel=1e-5)


def test_from_16_items_to_16384_ssmax_grows_as_the_logarithm_does():
    scale = QueryScale("length", HIDDEN, every_head, trained_context=16)
    short, long = scale(hidden[:, :2], torch.tensor([[15, 16383]]))[0, :, 0].tolist()
    assert long / short == pytest.approx(math.log(16385) / math.log(17), rel=1e-5)  # equals 3.43


def test_ssmax_bias_is_s_times_log_length_plus_b():
    scale = randomized("length-bias")
    expected = scale.s[1] * math.log(7 + 2) + scale.b[1]
    assert scale(hidden, positions)[0, 2, 1].item() == pytest.approx(expected.item(), rel=1e-5)


def test_ssmax_starts_as_in_its_paper():
    scale = QueryScale("length", HIDDEN, every_head, trained_context=1024)
    torch.testing.assert_close(scale.s, torch.full((HEADS,), 0.168), atol=1e-3, rtol=0)


def test_ssmax_bias_starts_as_plain_attention_at_the_trained_context():
    factor = QueryScale("length-bias", HIDDEN, every_head, trained_context=512)(hidden[:, :1], torch.tensor([[511]]))
    torch.testing.assert_close(factor, torch.ones(1, 1, HEADS))


def test_sentmax_learns_beta_and_gamma_themselves():
    scale = randomized("head")
    assert scale.beta.min() < 0  # no constraint keeps beta positive
    for token, position in enumerate([0, 1, 7, 4000]):
        for head in range(HEADS):
            beta, gamma = scale.beta[head].item(), scale.gamma_exponent[head].item()
            expected = 1 + beta * math.log(position + 2) ** gamma
            assert scale(hidden, positions)[0, token, head].item() == pytest.approx(expected, rel=1e-5)


def test_asentmax_has_beta_and_gamma_of_the_token():
    scale = randomized("token")
    for token, position in enumerate([0, 1, 7, 4000]):
        for head in range(HEADS):
            raw_beta = (scale.w_beta.weight[head] @ hidden[0, token] + scale.w_beta.bias[head]).item()
            raw_gamma = (scale.w_gamma.weight[head] @ hidden[0, token] + scale.w_gamma.bias[head]).item()
            beta, gamma = math.log1p(math.exp(raw_beta)), 2 * math.tanh(raw_gamma)
            expected = 1 + beta * math.log(position + 2) ** gamma
            assert scale(hidden, positions)[0, token, head].item() == pytest.approx(expected, rel=1e-5)


def test_start_values_are_those_of_the_authors():
    torch.manual_seed(0)
    heads = (True,) * 2000
    direct, projected = QueryScale("head", 1, heads, 512), QueryScale("token", 500, heads, 512)
    assert direct.beta.min() >= 0.1 and direct.beta.max() <= 1.0
    assert direct.gamma_exponent.std().item() == pytest.approx(0.1, rel=0.1)
    for linear in (projected.w_beta, projected.w_gamma):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.01)
        assert not linear.bias.any()


@pytest.mark.parametrize("kind", ["length", "length-bias", "head", "token"])
def test_heads_that_are_not_scaled_have_the_factor_one_and_no_parameters(kind):
    scale = randomized(kind, (False, True, False, True))
    assert {parameter.shape[0] for parameter in scale.parameters()} == {2}
    factor = scale(hidden, positions)
    assert (factor[..., ::2] == 1).all()
    assert (factor[..., 1::2] != 1).all()


@pytest.mark.parametrize("kind", ["head", "token"])
def test_a_fixed_gamma_leaves_only_beta_to_learn(kind):
    scale = QueryScale(kind, HIDDEN, every_head, trained_context=512, gamma=3.0)
    assert {name.split(".")[0] for name, _ in scale.named_parameters()} == {"beta" if kind == "head" else "w_beta"}
    beta = 0.5 if kind == "head" else math.log(2)  # ln 2 is softplus(0)
    with torch.no_grad():
        for parameter in scale.parameters():
            parameter.fill_(0.5 if kind == "head" else 0.0)
    expected = 1 + beta * torch.log(positions + 2.0) ** 3
    torch.testing.assert_close(scale(hidden, positions), expected[..., None].expand(-1, -1, HEADS))


def test_log_power_is_1_up_to_the_onset_and_then_grows():
    scale = randomized("log-power")
    scale.onset = 8
    factor = scale(hidden, positions)[0]
    torch.testing.assert_close(factor[:3], torch.ones(3, HEADS))  # position 7 is the eighth token
    expected = (math.log(4002) / math.log(9)) ** scale.gamma_exponent
    torch.testing.assert_close(factor[3], expected)


def test_log_power_starts_with_gamma_1():
    scale = QueryScale("log-power", HIDDEN, every_head, trained_context=512)
    assert scale(hidden[:, :1], torch.tensor([[4000]]))[0, 0, 0].item() == pytest.approx(math.log(4002) / math.log(513))


def test_llama4_is_the_scale_of_its_code():
    scale = QueryScale("llama4", HIDDEN, every_head, trained_context=512)
    at = torch.tensor([[0, 510, 511, 8191, 100000]])
    # the formula of transformers' modeling_llama4.py
    expected = torch.log1p(torch.floor((at.float() + 1.0) / 512)) * 0.1 + 1.0
    torch.testing.assert_close(scale(torch.zeros(1, 5, HIDDEN), at)[0, :, 0], expected[0])
