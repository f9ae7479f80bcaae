"""`sharp baseline` records entropies, and the drift index says how far a server is from the record."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from sharp.core.manifest import read_manifest
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.errors import InputError, NotFoundError
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.config import MetricsConfig
from sharp.serving.observability.cli import baseline as command
from sharp.serving.observability.metrics import Metrics
from sharp.serving.observability.metrics.baseline import Drift, make_baseline, read_baseline


def values(mean, tokens=2000, seed=0):
    """Return H / ln n [1 layer, tokens, 2 heads] about `mean`; head 1 is always 0, as if it looked at one key."""
    values = np.random.default_rng(seed).normal(mean, 0.05, (1, tokens, 2))
    values[..., 1] = 0
    return values


def rows(normalized, visible=100):
    """Return the rows of a step with the given H / ln n, at contexts of 100 tokens."""
    stats = np.ones((*normalized.shape, 4), np.float32)
    stats[..., 0] = normalized * np.log(visible)
    return AttentionRows(stats, np.full(normalized.shape[1], visible - 1))


@pytest.fixture
def recorded(counting):
    return make_baseline(read_manifest(counting), "corpus", values(0.5), np.full(2000, 128))


def index(recorded, *steps, half_life=10**9):
    drift = Drift(recorded, half_life)
    for step in steps:
        drift.add(rows(step))
    return drift.index()[0].tolist()


def test_bins_are_deciles_of_the_corpus(recorded):
    assert recorded.contexts == [128]
    assert recorded.counts[0][0] == [[pytest.approx(200, abs=2)] * 10]  # edges are rounded
    assert recorded.edges[0][1] == [[0] * 9]
    assert recorded.counts[0][1] == [[2000, *[0] * 9]]  # the edges are all equal, and all values are below them


def test_the_same_text_has_not_drifted(recorded):
    same, constant = index(recorded, values(0.5, seed=1))
    assert same < 0.02
    assert constant < 0.01


def test_the_index_is_the_sum_of_its_definition(recorded):
    live = values(0.53, tokens=1500, seed=2)
    # the precision in which the kernels write statistics
    stored = ((live * np.log(100)).astype(np.float32) / np.log(100)).round(3)[0, :, 0]
    counts = np.histogram(stored, [-np.inf, *np.nextafter(recorded.edges[0][0][0], 1), np.inf])[0]
    p, q = (counts + 0.5) / 1505, (np.array(recorded.counts[0][0][0]) + 0.5) / 2005
    assert index(recorded, live)[0] == pytest.approx(((p - q) * np.log(p / q)).sum(), rel=1e-6)
    assert index(recorded, live)[0] > 0.25


def test_longer_contexts_than_before_are_no_drift(counting):
    """Other shares of short and long contexts are no drift, because H / ln n is compared at equal lengths.

    The corpus has mostly short contexts, the server mostly long ones.
    """
    both = np.concatenate([values(0.5), values(0.8, seed=1)], axis=1)
    recorded = make_baseline(read_manifest(counting), "corpus", both, np.repeat([64, 128], 2000))
    drift = Drift(recorded, 10**9)
    drift.add(rows(values(0.5, tokens=100, seed=2), visible=50))
    drift.add(rows(values(0.8, tokens=1500, seed=3), visible=100))
    drift.add(rows(values(0.1, tokens=5000, seed=4), visible=500))  # the corpus had no contexts of that length
    assert drift.index().max() < 0.02
    drift.add(rows(values(0.8, tokens=400, seed=5), visible=50))
    assert drift.index()[0, 0] > 0.1


def test_a_head_that_was_always_sharp_and_no_longer_is(recorded):
    live = values(0.5, seed=3)
    live[..., 1] = 0.2
    same, spread = index(recorded, live)
    assert same < 0.02
    assert spread > 5


def test_few_tokens_and_short_contexts_say_nothing(recorded):
    assert np.isnan(index(recorded, values(0.5, tokens=1023))).all()
    drift = Drift(recorded, 10**9)
    drift.add(rows(values(0.5), visible=32))
    assert np.isnan(drift.index()).all()


def test_old_tokens_lose_their_weight(recorded):
    far, near = values(0.9, tokens=1000, seed=4), values(0.5, tokens=1000, seed=5)
    assert index(recorded, far, *[near] * 5, half_life=500)[0] < 0.1
    assert index(recorded, far, *[near] * 5)[0] > 0.15


@pytest.fixture
def file(counting, tmp_path):
    """Write a baseline of the counting model, whose heads have H / ln n of 1 and 0.5, and return its file."""
    text, output = tmp_path / "text.txt", tmp_path / "baseline.json"
    text.write_text("abcdefgh" * 100)
    result = CliRunner().invoke(command, [str(counting), str(text), "-o", str(output), "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "1 x 2 heads on 576 tokens" in result.output  # six sequences of 128 tokens; the rest of 32 is too short
    return output


def test_a_step_that_fails_leaves_no_baseline_of_the_rest(counting, tmp_path, monkeypatch):
    text, output = tmp_path / "text.txt", tmp_path / "baseline.json"
    text.write_text("abcdefgh" * 100)
    steps, step = [], OnnxRuntimeBackend.step

    def third_fails(backend, batch):
        steps.append(batch)
        if len(steps) == 3:
            raise RuntimeError("out of memory")
        return step(backend, batch)

    monkeypatch.setattr(OnnxRuntimeBackend, "step", third_fails)
    result = CliRunner().invoke(command, [str(counting), str(text), "-o", str(output), "--threads", "1"])
    assert (result.exit_code, output.exists()) == (2, False)
    assert "a step of the engine failed: out of memory" in result.output


def test_where_nothing_can_be_written_nothing_is_computed(tmp_path):
    (tmp_path / "text.txt").write_text("abc")
    result = CliRunner().invoke(
        command, [str(tmp_path / "no-model"), str(tmp_path / "text.txt"), "-o", str(tmp_path / "none" / "a.json")]
    )
    assert (result.exit_code, "a.json cannot be written; choose a file" in result.output) == (2, True), result.output


def test_the_command_records_what_the_model_does(file, counting):
    made = read_baseline(file, read_manifest(counting))
    assert (made.model, made.corpus, made.norm) == ("counting", "text.txt", "softmax")
    assert made.contexts == [64, 128]
    assert made.edges == [[[[1] * 9] * 2, [[0.5] * 9] * 2]]
    assert [sum(bins) for bins in made.counts[0][0]] == [6 * 32, 6 * 64]


def test_rounding_errors_are_no_drift(file, counting):
    manifest = read_manifest(counting)
    live = np.array([1, 0.5]) + np.random.default_rng(0).normal(0, 1e-6, (1, 1100, 2))
    assert max(index(read_baseline(file, manifest), live)) < 0.01


def test_metrics_compare_with_the_file(file, counting):
    metrics = Metrics()
    model = metrics.add_model(read_manifest(counting), MetricsConfig("head", attention_baseline=file))
    model.attention.heads.put(rows(np.full((1, 1100, 2), 0.7)))
    families = {family.name: family for family in text_string_to_metric_families(metrics.text("")[0].decode())}
    model.close()
    family = families["sharp_attention_drift_psi"]
    assert [sample.labels["head"] for sample in family.samples] == ["0", "1"]


def test_a_text_that_is_too_short_is_refused(counting, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a" * 100)
    result = CliRunner().invoke(command, [str(counting), str(text), "-o", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "has 68 tokens that see over 32 keys; a baseline needs 100 of similar context" in result.output
    assert not (tmp_path / "out").exists()
    text.write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(command, [str(counting), str(text), "-o", str(tmp_path / "out")])
    assert (result.exit_code, "is not text in UTF-8" in result.output) == (2, True)


def test_a_baseline_of_another_model_or_none_is_refused(file, counting, tmp_path):
    manifest = read_manifest(counting)
    with pytest.raises(NotFoundError, match="does not exist; record one with sharp baseline"):
        read_baseline(tmp_path / "none.json", manifest)
    other = manifest.model_copy(update={"norm": manifest.norm.model_copy(update={"name": "ssa"})})
    with pytest.raises(InputError, match="was recorded for counting with norm softmax, not for this model"):
        read_baseline(file, other)
    content = json.loads(file.read_text())
    for damage, message in (
        ({"edges": [[[[0.1]]]]}, "edges must have 9 numbers"),
        ({"counts": [[[[1]]]]}, "counts must have 10 numbers"),
        ({"format_version": 1}, "format_version"),
        ({"edges": [], "counts": []}, "edges must have"),
        ({"contexts": [64]}, "edges must have"),
    ):
        file.write_text(json.dumps(content | damage))
        with pytest.raises(InputError, match=message):
            read_baseline(file, manifest)
    file.write_text("{")
    with pytest.raises(InputError, match="is not a baseline: the file"):
        read_baseline(file, manifest)
