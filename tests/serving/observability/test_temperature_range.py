"""The server warns at start of an adaptive temperature that ends before the model's context, and counts the rows."""

import logging
import math
import shutil

import numpy as np
import pytest

from sharp.core.manifest import HeadNorm, read_manifest
from sharp.plugins.op.attributes import TEMPERATURE_PRESETS
from sharp.plugins.op.temperature_range import largest_sharpened, short_of_context
from sharp.serving.api.attention import AttentionRows
from sharp.serving.config import BackendConfig, EngineConfig, MetricsConfig
from sharp.serving.engine.loading import load_model_folder
from sharp.serving.observability.metrics.heads import HeadStatistics

ICML2025, ARXIV2024 = TEMPERATURE_PRESETS["icml2025"], TEMPERATURE_PRESETS["arxiv2024"]


@pytest.mark.parametrize(
    ("coefficients", "keys"), [(ICML2025, 381), (ARXIV2024, 98), ((-1.0, 3.0), 7), ((1.0,), 1), ((0.0, 0.0), 1)]
)
def test_how_far_a_polynomial_reaches(coefficients, keys):
    assert math.floor(math.exp(largest_sharpened(coefficients)) + 1e-9) == keys


def test_a_polynomial_that_rises_reaches_everything():
    assert largest_sharpened((0.1, -1.0)) == largest_sharpened((2.0,)) == math.inf


def test_the_polynomial_for_long_contexts_is_the_published_one_and_then_its_largest_value():
    entropies = np.linspace(0.5, math.log(2**18), 2000)
    published = np.polyval(ICML2025, np.minimum(entropies, 4.4))  # the polynomial is largest at 4.41 nats
    assert np.abs(np.polyval(TEMPERATURE_PRESETS["icml2025-long"], entropies) - published).max() < 0.05
    assert largest_sharpened(TEMPERATURE_PRESETS["icml2025-long"]) == math.inf


def adaptive(folder, **changes):
    manifest = read_manifest(folder)
    norm = {"normalizer": "adaptive_softmax", "temperature_coefficients": ICML2025}
    return manifest.model_copy(update={"norm": manifest.norm.model_copy(update=norm), **changes})


def test_the_sentence_is_of_the_context(counting):
    assert short_of_context(adaptive(counting, max_context=381)) is None
    said = short_of_context(adaptive(counting, max_context=4096))
    assert "beyond an entropy of 5.94 nats, which 381 keys" in said and "sharp fit-temperature" in said
    assert short_of_context(read_manifest(counting)) is None


def test_the_server_says_it_at_start(counting, tmp_path, caplog):
    shutil.copytree(counting, tmp_path, dirs_exist_ok=True)
    adaptive(counting, max_context=4096).write(tmp_path)
    with caplog.at_level(logging.WARNING):
        load_model_folder(tmp_path, BackendConfig(verify_files=False), EngineConfig(cache_tokens=256))
    assert "its adaptive temperature does nothing beyond" in caplog.text


def test_the_share_of_rows_that_it_leaves_alone(counting):
    manifest = adaptive(counting, max_context=4096)
    norm = manifest.norm.model_copy(
        update={
            "heads": (
                HeadNorm(
                    layer=0,
                    heads=(1,),
                    name="softmax",
                    normalizer="softmax",
                    alpha=1.5,
                    temperature_coefficients=ICML2025,
                    entropy_threshold=0.5,
                    temperature=1.0,
                ),
            )
        }
    )
    heads = HeadStatistics(manifest.model_copy(update={"norm": norm}), MetricsConfig())
    assert heads.snapshot().unsharpened is None
    stats = np.ones((1, 8, 2, 4), np.float32)
    stats[0, 6:, :, 0] = 6.0  # 2 of 8 rows are beyond 5.94 nats
    heads.put(AttentionRows(stats, np.arange(500, 508)))
    heads.flush(60)
    shares = heads.snapshot().unsharpened
    heads.close()
    assert shares[0, 0] == 0.25
    assert np.isnan(shares[0, 1])
