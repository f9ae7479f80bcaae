"""Heads are compared with the export's measurements: `sharp_attention_expected_*`, and the model's version."""

import hashlib
import math
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sharp.core.manifest import ExpectedEntropy, model_version, read_manifest
from sharp.serving.api.attention import AttentionRows
from sharp.serving.config import MetricsConfig
from sharp.serving.observability.metrics import Metrics

# Two heads with 33 to 64 and with 65 to 128 keys. Only the second head spreads in the longer range.
EXPECTED = ExpectedEntropy(
    text="LICENSE", contexts=(64, 128), tokens=(32, 64), normalized_entropy=(((0.2, 0.4), (0.8, 0.98)),)
)


@pytest.fixture
def model(counting):
    metrics = Metrics()
    manifest = read_manifest(counting).model_copy(update={"expected_entropy": EXPECTED, "max_context": 512})
    made = metrics.add_model(manifest, MetricsConfig("head", dispersion_half_life=10**9), "0123456789ab")

    def see(*contexts):
        positions = np.array(contexts) - 1
        made.attention.heads.put(AttentionRows(np.ones((1, len(positions), 2, 4), np.float32), positions))

    def series(name):
        families = text_string_to_metric_families(metrics.text("", [name])[0].decode())
        return {
            tuple(sample.labels[label] for label in sample.labels if label != "model"): sample.value
            for family in families
            for sample in family.samples
        }

    yield made, see, series
    made.close()
    assert series("sharp_model_info") == {}


def test_the_expected_mean_is_of_the_contexts_that_are_served(model):
    _, see, series = model
    assert series("sharp_attention_expected_normalized_entropy") == {}  # no request has come yet
    see(40, 50, 60, 100)
    found = series("sharp_attention_expected_normalized_entropy")
    assert found["0", "0"] == pytest.approx((3 * 0.2 + 0.4) / 4)
    assert found["0", "1"] == pytest.approx((3 * 0.8 + 0.98) / 4)
    assert series("sharp_attention_expected_dispersed_heads") == {("0",): 0}
    see(*[100] * 30)
    assert series("sharp_attention_expected_dispersed_heads") == {("0",): 1}
    assert series("sharp_attention_heads") == {("0",): 2}


def test_nothing_is_expected_of_contexts_that_were_not_measured(model):
    _, see, series = model
    see(100, 200, 210, 220)
    assert series("sharp_attention_expected_normalized_entropy") == {}
    assert series("sharp_attention_expected_dispersed_heads") == {}
    see(*[100] * 3)  # now most contexts were measured by the export
    assert series("sharp_attention_expected_normalized_entropy")["0", "0"] == pytest.approx(0.4)


def test_a_folder_without_a_measurement_has_no_such_series(counting):
    metrics = Metrics()
    made = metrics.add_model(read_manifest(counting), MetricsConfig("head"))
    made.attention.heads.put(AttentionRows(np.full((1, 1, 2, 4), math.log(100), np.float32), np.array([99])))
    text = metrics.text("")[0].decode()
    made.close()
    assert "sharp_attention_smoothed_normalized_entropy{" in text
    assert "sharp_attention_expected_normalized_entropy{" not in text


def test_the_version_is_the_hash_of_the_manifest(model, counting):
    _, _, series = model
    assert series("sharp_model_info") == {("softmax", "0123456789ab"): 1}
    assert model_version(counting) == hashlib.sha256((counting / "sharp.json").read_bytes()).hexdigest()[:12]


def test_a_server_shows_its_version(start_server, counting):
    started = start_server(counting)
    with urllib.request.urlopen(
        f"http://{started.http_address}/metrics?name[]=sharp_model_info", timeout=20
    ) as response:
        assert f'version="{model_version(counting)}"' in response.read().decode()
