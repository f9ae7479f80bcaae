import urllib.request

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sharp.plugins.manifest import read_manifest
from sharp.serving.attention import AttentionRows
from sharp.serving.config import EngineConfig, MetricsConfig
from sharp.serving.metrics.attention import AttentionMetrics
from sharp.v1 import inference_pb2, inference_pb2_grpc

TYPES = {
    "sharp_requests_running": "gauge",
    "sharp_requests_waiting": "gauge",
    "sharp_requests": "counter",
    "sharp_prompt_tokens": "counter",
    "sharp_generated_tokens": "counter",
    "sharp_preemptions": "counter",
    "sharp_prefix_cache_queries": "counter",
    "sharp_prefix_cache_hits": "counter",
    "sharp_kv_cache_usage_ratio": "gauge",
    "sharp_time_to_first_token_seconds": "histogram",
    "sharp_inter_token_latency_seconds": "histogram",
    "sharp_request_duration_seconds": "histogram",
    "sharp_request_queue_seconds": "histogram",
    "sharp_step_duration_seconds": "histogram",
    "sharp_attention_entropy_nats": "histogram",
    "sharp_attention_normalized_entropy": "gauge",
    "sharp_attention_support_ratio": "gauge",
    "sharp_attention_inverse_temperature": "gauge",
    "sharp_attention_logit_spread": "gauge",
    "sharp_attention_series_limited": "gauge",
}
PROMPTS = ("abcdefghij", "xyz")
NEW_TOKENS = 6


def scrape(started):
    with urllib.request.urlopen(f"http://{started.http_address}/metrics", timeout=10) as response:
        return {family.name: family for family in text_string_to_metric_families(response.read().decode())}


def generate(started, text, max_tokens):
    with grpc.insecure_channel(started.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(
            text=text, sampling={"temperature": 0}, stopping={"max_tokens": max_tokens}
        )
        return list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=20))


@pytest.fixture(scope="module")
def started(start_server, counting):
    """A server that answered two prompts, in chunks of at most four tokens."""
    started = start_server(counting, engine=EngineConfig(max_batch_tokens=4, max_sequences=4, attention_interval=1))
    for prompt in PROMPTS:
        generate(started, prompt, NEW_TOKENS)
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


def test_names_and_types(families):
    assert {name: family.type for name, family in families.items()} == TYPES


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
    """The keys that each token saw: the last generated token of a request is never attended from."""
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


def test_past_the_series_limit_there_is_one_series_per_layer(start_server, counting):
    started = start_server(counting, metrics=MetricsConfig(attention_series_limit=1))
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
    generate(started, "abcd", 9)  # steps 0 (the prompt), 4 and 8 of nine
    assert value(scrape(started), "sharp_attention_entropy_nats", "_count", head="0") == 4 + 1 + 1


def test_gauges_are_over_the_last_steps(counting):
    metrics = AttentionMetrics(read_manifest(counting), MetricsConfig(attention_window=2))
    for spread in (100.0, 1.0, 3.0):
        metrics.put(AttentionRows(np.full((1, 1, 2, 4), spread, np.float32), np.array([7])))
    families = {family.name: family for family in metrics.collect()}
    metrics.close()
    assert [sample.value for sample in families["sharp_attention_logit_spread"].samples] == [2, 2]
