"""Heads that spread their attention count as dispersed, from the context on where all longer ones are above too."""

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sharp.core.manifest import read_manifest
from sharp.serving.api.attention import AttentionRows
from sharp.serving.config import MetricsConfig
from sharp.serving.observability.metrics import Metrics
from sharp.serving.observability.metrics.dispersion import Dispersion, context_bounds
from sharp.serving.observability.metrics.heads import HeadStatistics

BOUNDS = context_bounds(512)  # the bounds are 32, 64, 128, 256, 512


def dispersion(**settings):
    defaults = {"dispersion_threshold": 0.9, "dispersion_tokens": 100, "dispersion_half_life": 100}
    return Dispersion(1, 1, BOUNDS, MetricsConfig(**{**defaults, **settings}))


def add(table, mean, tokens, index=2):
    """Add `tokens` tokens of one range of contexts, with a mean H / ln n of `mean`."""
    counts = np.zeros(len(BOUNDS), np.int64)
    counts[index] = tokens
    table.add((mean * counts)[None, None], counts)


def test_bounds_double_up_to_the_longest_context():
    assert list(BOUNDS) == [32, 64, 128, 256, 512]
    assert list(context_bounds(513))[-1] == 1024
    assert list(context_bounds(8)) == [32]


def test_the_mean_halves_a_token_every_half_life():
    table = dispersion()
    add(table, 1.0, 50)
    add(table, 0.0, 100)
    assert table.smoothed() == pytest.approx(50 * 0.5 / (50 * 0.5 + 100))


def test_short_contexts_say_nothing():
    table = dispersion()
    add(table, 1.0, 1000, index=0)
    assert np.isnan(table.smoothed())
    assert not table.dispersed().any()
    assert np.isnan(table.crossing())


def test_a_head_is_dispersed_after_it_was_above_for_long_enough_and_not_after_it_came_back():
    table = dispersion()
    seen = []
    for mean in (0.95, 0.95, 0.95, 0.5, 0.95):
        add(table, mean, 60)
        seen.append(bool(table.dispersed()))
    assert seen == [False, False, True, False, False]  # above the threshold for 0, 60 and 120 tokens, then below


def test_the_crossing_is_where_all_longer_contexts_are_above():
    table = dispersion(dispersion_half_life=10**9)
    for index, mean in enumerate((1.0, 0.95, 0.7, 0.92, 0.97)):
        add(table, mean, 10, index)
    assert table.crossing() == 128  # 33 to 64 keys are above, too, but 65 to 128 are not
    add(table, 0.0, 10, index=4)
    assert np.isnan(table.crossing())  # the longest contexts are now below the threshold


def test_contexts_that_were_not_seen_do_not_hide_a_crossing():
    table = dispersion(dispersion_half_life=10**9)
    add(table, 0.5, 10, index=1)
    add(table, 0.95, 10, index=3)
    assert table.crossing() == 128


def test_what_was_seen_long_ago_is_forgotten():
    table = dispersion(dispersion_half_life=1)
    add(table, 0.0, 1, index=4)
    for _ in range(50):
        add(table, 0.95, 100, index=1)
    assert table.crossing() == 32


@pytest.fixture
def series(counting):
    """Yield the metrics by name of a model with two heads in growing contexts; only head 1 spreads as n grows."""
    metrics = Metrics()
    config = MetricsConfig("head", dispersion_threshold=0.9, dispersion_tokens=48)
    model = metrics.add_model(read_manifest(counting), config)
    for start in range(0, 128, 16):
        positions = np.arange(start, start + 16)
        stats = np.ones((1, 16, 2, 4), np.float32)
        log = np.log(positions + 1)
        stats[0, :, 0, 0] = 0.3 * log
        stats[0, :, 1, 0] = np.where(positions < 64, 0.5, 0.95) * log
        model.attention.heads.put(AttentionRows(stats, positions))
    yield {
        (sample.name, *(sample.labels[name] for name in sample.labels if name != "model")): sample.value
        for family in text_string_to_metric_families(metrics.text("")[0].decode())
        for sample in family.samples
    }
    model.close()


def test_entropy_by_context_is_shown_per_layer(series):
    name = "sharp_attention_context_normalized_entropy"
    found = {
        context: (series[f"{name}_sum", "0", context], series[f"{name}_count", "0", context])
        for context in ("32", "64", "128")
    }
    assert found["32"] == (pytest.approx(31 * 0.8, rel=1e-5), 2 * 31)  # the first token has no normalized entropy
    assert found["64"] == (pytest.approx(32 * 0.8, rel=1e-5), 2 * 32)
    assert found["128"] == (pytest.approx(64 * 1.25, rel=1e-5), 2 * 64)


def test_the_smoothed_entropy_and_the_crossing_are_shown_per_head(series):
    weight = [0.5 ** ((96 - 16 * (step + 1)) / 1024) for step in range(6)]  # six steps have more than 32 keys
    mean = np.average([0.5, 0.5, 0.95, 0.95, 0.95, 0.95], weights=weight)
    assert series["sharp_attention_smoothed_normalized_entropy", "0", "1"] == pytest.approx(mean, rel=1e-5)
    assert series["sharp_attention_smoothed_normalized_entropy", "0", "0"] == pytest.approx(0.3, rel=1e-5)
    assert series["sharp_attention_dispersion_context_tokens", "0", "1"] == 64
    assert ("sharp_attention_dispersion_context_tokens", "0", "0") not in series
    assert series["sharp_attention_dispersed_heads", "0"] == 0  # the mean of head 1 is still below the threshold


def test_dispersed_heads_are_counted_per_layer(counting):
    heads = HeadStatistics(
        read_manifest(counting),
        MetricsConfig("head", dispersion_threshold=0.9, dispersion_tokens=32, dispersion_half_life=16),
    )
    for _ in range(4):
        positions = np.arange(64, 80)
        stats = np.ones((1, 16, 2, 4), np.float32)
        stats[0, :, :, 0] = np.log(positions + 1)[:, None] * [0.5, 0.95]
        heads.put(AttentionRows(stats, positions))
    heads.flush(10)
    snapshot = heads.snapshot()
    heads.close()
    assert snapshot.dispersed.tolist() == [[False, True]]
