import threading
import urllib.request
from dataclasses import replace

import grpc
import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from sharp.core.manifest import read_manifest
from sharp.serving.api.attention import AttentionRows, add_up
from sharp.serving.api.errors import InputError
from sharp.serving.config import EngineConfig, MetricsConfig
from sharp.serving.engine.engine import Engine
from sharp.serving.observability.metrics import Metrics
from sharp.serving.observability.metrics import heads as heads_module
from sharp.serving.observability.metrics.heads import entropy_buckets
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.serving.observability.metric_families import FAMILIES, HEAD, LAYER

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PROMPTS = ("abcdefghij", "xyz")
NEW_TOKENS = 6


def scrape(started, accept="text/plain"):
    request = urllib.request.Request(f"http://{started.http_address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        text, content_type = response.read().decode(), response.headers["content-type"]
    assert content_type.startswith(accept.split(";")[0])
    parse = openmetrics if accept == OPENMETRICS else text_string_to_metric_families
    return {family.name: family for family in parse(text)}


def generate(started, text, max_tokens, request_id=""):
    with grpc.insecure_channel(started.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(
            request_id=request_id, text=text, sampling={"temperature": 0}, stopping={"max_tokens": max_tokens}
        )
        return list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=20))


@pytest.fixture(scope="module")
def started(start_server, counting):
    """Return a server that has completed two prompts, in chunks of at most four tokens."""
    started = start_server(counting, engine=EngineConfig(max_batch_tokens=4, max_sequences=4, attention_interval=1))
    for prompt in PROMPTS:
        generate(started, prompt, NEW_TOKENS, request_id=f'say "{prompt}"')
    return started


@pytest.fixture(scope="module")
def families(started):
    return scrape(started)


def value(families, name, suffix="", **labels):
    found = [
        sample.value
        for sample in families[name].samples
        if sample.name == name + suffix and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, found
    return found[0]


def test_names_types_units_and_labels(started):
    found = {}
    for family in scrape(started, OPENMETRICS).values():
        labels = {frozenset(name for name in sample.labels if name != "le") for sample in family.samples}
        found[family.name] = (family.type, family.unit, *labels)
    # These metrics have no series here: contexts are too short, and there is no adaptive temperature, no sink, and no
    # entropy measured by the export.
    for name in (
        "sharp_attention_smoothed_normalized_entropy",
        "sharp_attention_dispersion_context_tokens",
        "sharp_attention_drift_psi",
        "sharp_attention_unsharpened_ratio",
        "sharp_attention_sink_mass",
        "sharp_attention_expected_normalized_entropy",
    ):
        found[name] += (frozenset(HEAD),)
    found["sharp_attention_expected_dispersed_heads"] += (frozenset(LAYER),)
    assert found == {name: (kind, unit, frozenset(labels)) for name, (kind, unit, labels) in FAMILIES.items()}


def test_the_text_format_has_the_same_families(families):
    assert {name: family.type for name, family in families.items()} == {
        name: kind for name, (kind, *_) in FAMILIES.items()
    }


def test_exemplars_carry_request_ids(started):
    families = scrape(started, OPENMETRICS)
    ids = {f'say "{prompt}"' for prompt in PROMPTS}
    for name in (
        "sharp_requests",
        "sharp_time_to_first_token_seconds",
        "sharp_inter_token_latency_seconds",
        "sharp_request_duration_seconds",
        "sharp_request_queue_seconds",
    ):
        exemplars = [sample.exemplar for sample in families[name].samples if sample.exemplar]
        assert exemplars
        assert {exemplar.labels["request_id"] for exemplar in exemplars} <= ids
        assert all(exemplar.timestamp for exemplar in exemplars)


@pytest.mark.parametrize("request_id", ["x" * 256, "a\0b"])
def test_a_request_id_that_fits_no_exemplar_is_counted_without_one(start_server, counting, request_id):
    started = start_server(counting)
    generate(started, "ab", 2, request_id=request_id)
    families = scrape(started, OPENMETRICS)
    assert value(families, "sharp_requests", "_total", finish_reason="length") == 1
    assert not any(sample.exemplar for family in families.values() for sample in family.samples)


def test_latency_buckets_are_those_of_vllm(families):
    bounds = [
        sample.labels["le"] for sample in families["sharp_request_duration_seconds"].samples if "le" in sample.labels
    ]
    assert bounds[:3] == ["0.3", "0.5", "0.8"]
    assert bounds[-2:] == ["7680.0", "+Inf"]


def test_each_completion_counts_with_its_tokens_and_phases(families):
    def sum_of(name):
        return value(families, name, "_sum", model="counting")

    assert sum_of("sharp_request_prompt_tokens") == sum(map(len, PROMPTS))
    assert sum_of("sharp_request_generated_tokens") == len(PROMPTS) * NEW_TOKENS
    assert value(families, "sharp_request_generated_tokens", "_bucket", le="5.0") == 0
    assert value(families, "sharp_request_generated_tokens", "_bucket", le="10.0") == len(PROMPTS)
    prefill, decode = sum_of("sharp_request_prefill_seconds"), sum_of("sharp_request_decode_seconds")
    queue = sum_of("sharp_request_queue_seconds")
    assert queue + prefill == pytest.approx(sum_of("sharp_time_to_first_token_seconds"))
    assert decode == pytest.approx(sum_of("sharp_inter_token_latency_seconds"))
    each = sum_of("sharp_request_time_per_output_token_seconds")
    assert each == pytest.approx(decode / (NEW_TOKENS - 1))


def test_requests_and_tokens(families):
    assert value(families, "sharp_requests", "_total", finish_reason="length", model="counting") == 2
    assert value(families, "sharp_requests", "_total", finish_reason="cancelled") == 0
    assert value(families, "sharp_prompt_tokens", "_total", model="counting") == sum(map(len, PROMPTS))
    assert value(families, "sharp_generated_tokens", "_total") == 2 * NEW_TOKENS
    assert value(families, "sharp_prefix_cache_queries", "_total") == sum(map(len, PROMPTS))
    assert value(families, "sharp_prefix_cache_hits", "_total") == 0
    assert value(families, "sharp_requests_running") == 0
    assert value(families, "sharp_kv_cache_usage_ratio") == 0
    for name, count in (
        ("sharp_time_to_first_token_seconds", 2),
        ("sharp_inter_token_latency_seconds", 2 * (NEW_TOKENS - 1)),
        ("sharp_request_duration_seconds", 2),
        ("sharp_request_queue_seconds", 2),
        ("sharp_step_duration_seconds", 3 + 1 + 2 * (NEW_TOKENS - 1)),  # ten tokens take three steps
    ):
        assert value(families, name, "_count") == count
        assert value(families, name, "_sum") > 0


@pytest.fixture(scope="module")
def visible():
    """Return how many keys each token saw. The last generated token of a request is not computed."""
    return np.concatenate([np.arange(1, len(prompt) + NEW_TOKENS) for prompt in PROMPTS])


@pytest.mark.parametrize(("head", "scale"), [("0", 1), ("1", 0.5)])
def test_every_token_is_in_the_entropy_histogram_once(families, visible, head, scale):
    labels = {"model": "counting", "layer": "0", "head": head}
    entropy = scale * np.log(visible.astype(np.float32))
    name = "sharp_attention_entropy_nats"
    assert value(families, name, "_count", **labels) == len(visible)
    assert value(families, name, "_sum", **labels) == pytest.approx(entropy.sum(), rel=1e-6)
    for bound in ("0.5", "2.0", "+Inf"):
        assert value(families, name, "_bucket", le=bound, **labels) == (entropy <= float(bound)).sum()


@pytest.mark.parametrize(("head", "scale"), [("0", 1), ("1", 0.5)])
def test_gauges_of_a_head(families, head, scale):
    labels = {"model": "counting", "layer": "0", "head": head}
    assert value(families, "sharp_attention_normalized_entropy", **labels) == pytest.approx(scale)
    assert value(families, "sharp_attention_support_ratio", **labels) == pytest.approx(scale)
    assert value(families, "sharp_attention_inverse_temperature", **labels) == pytest.approx(1 / scale)
    assert value(families, "sharp_attention_logit_spread", **labels) == pytest.approx(1)


def test_entropy_buckets_end_at_the_logarithm_of_the_longest_context(families):
    samples = families["sharp_attention_entropy_nats"].samples
    bounds = [sample.labels["le"] for sample in samples if sample.name.endswith("_bucket")]
    assert bounds[: len(bounds) // 2] == ["0.1", "0.25", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0", "4.0", "5.0", "+Inf"]
    assert entropy_buckets(131_072)[-1] == 12
    assert list(entropy_buckets(2)) == [0.1, 0.25, 0.5, 1]


def test_off_shows_no_attention(start_server, counting):
    started = start_server(counting, metrics=MetricsConfig("off"))
    with grpc.insecure_channel(started.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(
            text="ab", response={"attention_stats": True}, stopping={"max_tokens": 2, "ignore_eos": True}
        )
        *_, last = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=20)
    assert last.finished.attention_stats.tokens == 3  # statistics on demand still exist
    families = scrape(started)
    assert set(families) == {name for name in FAMILIES if "attention" not in name}
    assert value(families, "sharp_generated_tokens", "_total") == 2


def test_layer_level_is_what_was_requested_and_no_limit(start_server, counting):
    started = start_server(counting, metrics=MetricsConfig("layer"))
    generate(started, "abcd", 1)
    families = scrape(started)
    assert value(families, "sharp_attention_series_limited") == 0
    assert {sample.labels["head"] for sample in families["sharp_attention_entropy_nats"].samples} == {"all"}
    assert value(families, "sharp_attention_support_ratio") == pytest.approx(0.75)


def test_past_the_series_limit_there_is_one_series_per_layer(start_server, counting):
    started = start_server(counting, metrics=MetricsConfig("head", attention_series_limit=1))
    generate(started, "abcd", 1)
    families = scrape(started)
    assert value(families, "sharp_attention_series_limited", model="counting") == 1
    assert {sample.labels["head"] for sample in families["sharp_attention_entropy_nats"].samples} == {"all"}
    entropy = np.log(np.arange(1, 5)).sum() * 1.5
    assert value(families, "sharp_attention_entropy_nats", "_sum") == pytest.approx(entropy, rel=1e-6)
    assert value(families, "sharp_attention_entropy_nats", "_count") == 8
    assert value(families, "sharp_attention_normalized_entropy") == pytest.approx(0.75)


def test_the_interval_chooses_the_steps(start_server, counting):
    started = start_server(counting, engine=EngineConfig(attention_interval=4))
    generate(started, "abcd", 9)  # statistics of steps 0 (the prompt), 4 and 8 of nine
    assert value(scrape(started), "sharp_attention_entropy_nats", "_count", head="0") == 4 + 1 + 1


def rows(entropy, positions, layers=1, heads=2):
    stats = np.ones((layers, len(positions), heads, 4), np.float32)
    stats[..., 0] = entropy
    return AttentionRows(stats, np.array(positions))


def test_a_windows_layer_is_normalized_by_the_keys_in_its_window():
    found = replace(rows(0.0, [3, 9], layers=2, heads=1), windows=np.array([4, 100]))
    found.stats[..., 0] = np.log(found.visible)[..., None]
    assert found.visible.tolist() == [[4, 4], [4, 10]]
    found.stats[..., 1] = 2
    summary = add_up(found).summary()
    assert summary.normalized_entropy.ravel() == pytest.approx([1, 1])
    assert summary.support_ratio.ravel() == pytest.approx([0.5, (2 / 4 + 2 / 10) / 2])


def parsed(metrics):
    return {family.name: family for family in text_string_to_metric_families(metrics.text("")[0].decode())}


@pytest.fixture
def metrics(counting):
    """Yield a function that gives metric families by name, and the statistics of a model without a server."""
    made = Metrics()
    model = made.add_model(read_manifest(counting), MetricsConfig("head", attention_window=2))

    def families():
        return parsed(made)

    yield families, model.attention.heads
    model.close()


def test_gauges_are_over_the_last_steps(metrics):
    families, heads = metrics
    for spread in (100.0, 1.0, 3.0):
        heads.put(AttentionRows(np.full((1, 1, 2, 4), spread, np.float32), np.array([7])))
    assert [sample.value for sample in families()["sharp_attention_logit_spread"].samples] == [2, 2]


def test_the_sinks_mass_has_series_where_a_model_has_sinks(metrics):
    families, heads = metrics
    heads.put(AttentionRows(np.ones((1, 1, 2, 4), np.float32), np.array([7])))
    assert not families()["sharp_attention_sink_mass"].samples
    for mass in (0.2, 0.4, 0.8):
        stats = np.ones((1, 2, 2, 5), np.float32)
        stats[..., 4] = mass, mass / 2
        heads.put(AttentionRows(stats, np.array([7, 8])))
    found = families()["sharp_attention_sink_mass"].samples
    assert [sample.value for sample in found] == pytest.approx([0.6, 0.3])
    assert [sample.labels["head"] for sample in found] == ["0", "1"]


def test_a_row_that_is_not_finite_is_left_out_and_counted(metrics):
    families, heads = metrics
    entropy = np.full((1, 3, 2), np.log(8))
    entropy[0, 1, 0] = np.nan
    heads.put(rows(entropy, [7, 7, 7]))
    found = families()
    assert value(found, "sharp_attention_left_out_tokens", "_total") == 1
    assert value(found, "sharp_attention_entropy_nats", "_count", head="1") == 2
    assert value(found, "sharp_attention_normalized_entropy", head="0") == pytest.approx(1)


def test_the_engine_does_not_wait_for_statistics(metrics, monkeypatch):
    """The engine does not wait while statistics hang: steps are queued up to a bound, and then left out."""
    families, heads = metrics
    go_on = threading.Event()
    add = heads._add
    monkeypatch.setattr(heads, "_add", lambda step: (go_on.wait(30), add(step)))
    monkeypatch.setattr(heads_module, "MOST_PENDING_BYTES", 4 * rows(0, [7]).stats.nbytes)
    for _ in range(20):
        heads.put(rows(0, [7]))  # without the bound, this call would block forever
    go_on.set()
    found = families()
    counted = value(found, "sharp_attention_entropy_nats", "_count", head="0")
    assert 4 <= counted <= 5  # one step may have been taken off the queue before it was full
    assert value(found, "sharp_attention_left_out_tokens", "_total") == 20 - counted


def test_models_share_families(counting, hashing):
    metrics = Metrics()
    models = [metrics.add_model(read_manifest(folder), MetricsConfig("head")) for folder in (counting, hashing)]
    models[1].attention.heads.put(rows(0, [7]))
    text = metrics.text("")[0].decode()
    for model in models:
        model.close()
    assert text.count("# TYPE sharp_attention_entropy_nats histogram") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    name = "sharp_attention_entropy_nats"
    assert value(families, name, "_count", model="counting", head="0") == 0
    assert value(families, name, "_count", model="hashing", head="0") == 1
    assert value(families, "sharp_requests", "_total", model="hashing", finish_reason="stop") == 0


def test_a_step_that_runs_is_seen(start_server, counting, monkeypatch):
    started = start_server(counting)
    assert value(scrape(started), "sharp_engine_step_running_seconds") == 0
    step, waiting, go_on = Engine.step, threading.Event(), threading.Event()

    def slow(engine):
        waiting.set()
        go_on.wait(20)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)
    request = threading.Thread(target=generate, args=(started, "ab", 1))
    request.start()
    assert waiting.wait(20)
    assert value(scrape(started), "sharp_engine_step_running_seconds") > 0
    go_on.set()
    request.join()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_metrics": "heads"}, "attention_metrics is 'heads'; it must be one of: off, layer, head"),
        ({"dispersion_threshold": 1.5}, "dispersion_threshold is 1.5"),
        ({"dispersion_tokens": -1}, "dispersion_tokens is -1; it must be at least 0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(InputError, match=message):
        MetricsConfig(**settings)


def test_names_of_models_are_escaped(counting):
    metrics = Metrics()
    name = 'a "b" \\ c'
    model = metrics.add_model(read_manifest(counting).model_copy(update={"name": name}), MetricsConfig("head"))
    model.attention.heads.put(rows(0, [7]))
    for accept, parse in (("", text_string_to_metric_families), (OPENMETRICS, openmetrics)):
        text = metrics.text(accept)[0].decode()
        labels = {sample.labels["model"] for family in parse(text) for sample in family.samples}
        assert labels == {name}
    model.close()
