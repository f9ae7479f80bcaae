"""The content of the pictures of an inspection, read from matplotlib's figures."""

import numpy as np
import pytest

from sharp.exporter.inspection.attention_map import AttentionMap
from sharp.exporter.inspection.heads import TokenStatistics
from sharp.exporter.inspection.pictures import draw_entropy, draw_heads, draw_maps

LAYERS, HEADS, TOKENS = 2, 3, 4


@pytest.fixture
def statistics() -> TokenStatistics:
    visible = np.tile(np.arange(1.0, TOKENS + 1), (LAYERS, 1))
    shape = (LAYERS, HEADS, TOKENS)
    entropy = np.log(visible)[:, None] * np.array([0.1, 0.5, 0.9])[:, None]
    ones = np.ones(shape)
    return TokenStatistics(visible, entropy, visible[:, None] * ones / 2, ones, ones, None)


def test_a_layer_has_a_curve_per_head_their_mean_and_that_of_uniform_attention(statistics) -> None:
    figure = draw_entropy(statistics, trained_context=2)
    panels = figure.axes[:LAYERS]
    assert [panel.get_title() for panel in panels] == ["layer 0", "layer 1"]
    named = {line.get_label(): line for line in panels[0].lines}
    assert len(panels[0].lines) == HEADS + 3
    assert {"mean and deviation of the heads", "ln n: uniform attention", "trained context"} <= named.keys()
    mean = named["mean and deviation of the heads"].get_ydata()
    uniform = named["ln n: uniform attention"].get_ydata()
    np.testing.assert_allclose(uniform, np.log([1, 2, 3, 4]))
    np.testing.assert_allclose(mean, 0.5 * uniform)
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown.count("a head") == 1 and len(shown) == 4


def test_a_heat_map_has_a_cell_per_head(statistics) -> None:
    entropy, support = (panel.images[0].get_array() for panel in draw_heads(statistics).axes[:2])
    np.testing.assert_allclose(entropy, np.tile([0.1, 0.5, 0.9], (LAYERS, 1)))
    np.testing.assert_allclose(support, np.full((LAYERS, HEADS), 0.5))


def test_a_weight_of_0_stays_white_and_every_other_is_shown() -> None:
    weights = np.array([[1.0, 0.0], [0.25, 0.75]])
    figure = draw_maps((AttentionMap(1, 2, np.arange(2), 1, weights),))
    shown = figure.axes[0].images[0].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), weights == 0)
    np.testing.assert_allclose(shown.filled(0), weights)
    assert figure.axes[0].get_title() == "layer 1, head 2"
