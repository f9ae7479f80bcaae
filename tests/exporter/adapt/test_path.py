"""The path from softmax to another norm, along which the norm moves during the first half of a run."""

import pytest
import torch
from torch.testing import assert_close

from sharp.exporter.adapt.recipe import alpha_at, temperature_at
from sharp.plugins.op.torch_normalizers import DEFAULT_TEMPERATURE, attention_weights, entropy

LOGITS = torch.randn(4, 3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
VISIBLE = torch.ones(50, dtype=torch.bool)


def adaptive(share: float) -> torch.Tensor:
    coefficients = temperature_at(share, DEFAULT_TEMPERATURE)
    return attention_weights("adaptive_softmax", LOGITS, VISIBLE, temperature_coefficients=coefficients)


def test_adaptive_temperature_begins_as_softmax_and_sharpens_until_the_middle() -> None:
    assert_close(adaptive(0.0), LOGITS.softmax(-1))
    entropies = [entropy(adaptive(share)).mean().item() for share in (0.0, 0.1, 0.3, 0.5)]
    assert entropies == sorted(entropies, reverse=True) and entropies[0] - entropies[-1] > 0.5
    for share in (0.5, 0.8, 1.0):
        assert_close(adaptive(share), attention_weights("adaptive_softmax", LOGITS, VISIBLE))


@pytest.mark.parametrize("target", [1.5, 2.0])
def test_alpha_grows_until_the_middle(target: float) -> None:
    alphas = [alpha_at(share, target) for share in (0.0, 0.2, 0.4)]
    assert alphas == sorted(alphas) and alphas[0] < 1.1
    assert alpha_at(0.5, target) == alpha_at(1.0, target) == pytest.approx(target)
