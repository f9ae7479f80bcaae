"""The fit of norm log-power by entropy, on logits whose best factor is known."""

import math

import numpy as np
import pytest
import torch

from sharp.models.attention import EagerAttention
from sharp.models.length_scale_fit import (
    ScalePoints,
    cross_entropies,
    entropy_keeping_factors,
    fit_gammas,
    scale_points,
    scaled_attention,
)
from sharp.models.objective import TrainingBatch
from sharp.plugins.op.torch_normalizers import entropy
from tests.exporter.conftest import tiny_model

ONSET = 16


def test_the_factor_gives_back_the_entropy():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits[:, 30:] = -math.inf  # the row does not see these keys
    factors = torch.tensor([0.5, 1.0, 1.5, 2.0, 4.0])
    target = entropy(torch.softmax(factors[:, None] * logits, -1))
    found = entropy_keeping_factors(torch.log_softmax(logits, -1), target)
    torch.testing.assert_close(found, factors, rtol=1e-3, atol=0)


def test_gammas_are_those_that_made_the_factors():
    lengths = np.array([20, 50, 100, 1000])
    gammas = np.array([[0.0, 1.0, -0.5], [2.0, 0.3, 3.0]])
    growth = np.log(lengths + 1) / math.log(ONSET + 1)
    factors = growth ** gammas[..., None]
    np.testing.assert_allclose(fit_gammas(ScalePoints(lengths, factors), ONSET), gammas, atol=1e-9)


def test_a_model_is_left_alone_up_to_the_onset_and_scaled_beyond():
    model = tiny_model("softmax", "rope", layers=2).eval()
    config = model.config
    tokens = torch.arange(40)[None]
    gammas = np.full((2, config.q_heads), 1.5)
    with torch.no_grad():
        plain = model(tokens, attention=EagerAttention(config))
        scaled = model(tokens, attention=scaled_attention(config, gammas, ONSET))
    torch.testing.assert_close(scaled[:, :ONSET], plain[:, :ONSET])
    assert (scaled[:, ONSET:] - plain[:, ONSET:]).abs().amax() > 1e-4


def test_from_windows_to_gammas_and_what_they_do():
    model = tiny_model("softmax", "rope", layers=2).eval()
    window = torch.randint(200, (1, 65), generator=torch.Generator().manual_seed(0))
    batches = [TrainingBatch((window[:, :-1],), window[:, 1:])] * 2
    points = scale_points(model, batches, ONSET, lambda: None)
    assert points.factors.shape == (2, model.config.q_heads, len(points.lengths))
    assert points.lengths.min() == ONSET + 1 and points.lengths.max() == 64
    gammas = fit_gammas(points, ONSET)
    assert (gammas > 0).all()  # the weights are nearly uniform, like those of an untrained model
    plain, scaled = cross_entropies(model, batches, gammas, ONSET, lambda: None)
    assert plain == pytest.approx(scaled, rel=0.5) and plain != scaled
