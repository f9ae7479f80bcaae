"""`/metrics` over the wire: compressed, filtered by name, small by default, and with vLLM's names."""

import gzip

import numpy as np
import pytest
import requests
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from sharp.core.manifest import read_manifest
from sharp.serving.api.attention import AttentionRows
from sharp.serving.config import MetricsConfig
from sharp.serving.engine.report import EngineReport
from sharp.serving.observability.metrics import Metrics

NEW = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def address(start_server, counting):
    address = f"http://{start_server(counting, metrics=MetricsConfig(metric_aliases='vllm')).http_address}"
    body = {"prompt": "a", "max_tokens": 5, "temperature": 0}
    assert requests.post(f"{address}/v1/completions", json=body, timeout=10).status_code == 200
    return address


def families(text, parse=text_string_to_metric_families):
    return {family.name: family for family in parse(text)}


def test_a_scrape_is_compressed_where_that_is_read(address):
    plain = requests.get(f"{address}/metrics", headers={"accept-encoding": "identity"}, timeout=10)
    packed = requests.get(f"{address}/metrics", headers={"accept-encoding": "gzip"}, stream=True, timeout=10)
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    wire = packed.raw.read(decode_content=False)
    assert families(gzip.decompress(wire).decode()).keys() == families(plain.text).keys()
    assert len(wire) < len(plain.content) / 5


@pytest.mark.parametrize("accept", ["text/plain", NEW])
def test_only_some_metrics(address, accept):
    names = ["sharp_requests_running", "sharp_generated_tokens_total", "sharp_attention_entropy_nats_bucket"]
    names.append("vllm:num_requests_running")
    text = requests.get(f"{address}/metrics", {"name[]": names}, headers={"accept": accept}, timeout=10).text
    found = families(text, openmetrics if accept == NEW else text_string_to_metric_families)
    assert set(found) == {
        "sharp_requests_running",
        "sharp_generated_tokens",
        "sharp_attention_entropy_nats",
        "vllm:num_requests_running",
    }


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_a_version_that_is_no_number_gets_the_usual_text(address, kind):
    """A version that is no number gets the usual text.

    Once the library compared it with numbers, and the response was 500.
    """
    response = requests.get(f"{address}/metrics", headers={"accept": f"{kind};version=newest"}, timeout=10)
    assert (response.status_code, response.headers["content-type"][:10]) == (200, "text/plain")


def test_heads_on_request(address):
    def heads(**query):
        found = families(requests.get(f"{address}/metrics", query, timeout=10).text)
        return {sample.labels["head"] for sample in found["sharp_attention_entropy_nats"].samples}

    assert heads() == {"all"}
    assert heads(attention="head") == {"0", "1"}


@pytest.mark.parametrize("accept", ["text/plain", NEW])
def test_vllms_names(address, accept):
    parse = openmetrics if accept == NEW else text_string_to_metric_families
    found = families(requests.get(f"{address}/metrics", headers={"accept": accept}, timeout=10).text, parse)
    samples = {sample.name: sample for name in found if name.startswith("vllm:") for sample in found[name].samples}
    assert samples["vllm:generation_tokens_total"].value == 5
    assert samples["vllm:generation_tokens_total"].labels == {"model_name": "counting"}
    assert samples["vllm:e2e_request_latency_seconds_count"].value == 1
    assert samples["vllm:request_success_total"].labels.keys() == {"model_name", "finished_reason"}
    assert found["vllm:time_to_first_token_seconds"].type == "histogram"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert samples[f"vllm:{name}"].value == 0
    for name in (
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
        *("request_prefill_time_seconds", "request_decode_time_seconds", "request_queue_time_seconds"),
        "request_time_per_output_token_seconds",
    ):
        assert samples[f"vllm:{name}_count"].value == 1


def test_without_aliases_there_are_none(start_server, counting):
    address = f"http://{start_server(counting).http_address}"
    assert "vllm:" not in requests.get(f"{address}/metrics", timeout=10).text


def test_a_model_of_thirty_layers_is_small_on_the_wire(counting):
    """The metrics of SmolLM2-135M, with 30 layers of 9 heads, are small on the wire."""
    manifest = read_manifest(counting).model_copy(update={"layers": 30, "q_heads": 9, "max_context": 8192})
    metrics = Metrics()
    model = metrics.add_model(manifest, MetricsConfig())
    tokens = 3000
    stats = np.abs(np.random.default_rng(1).normal(2, 1, (30, tokens, 9, 4))).astype(np.float32)
    try:
        model.observe(report(AttentionRows(stats, np.arange(tokens))))
        text, _ = metrics.text("text/plain")
        heads, _ = metrics.text("text/plain", per_head=True)
        found = families(text.decode())
    finally:
        model.close()
    assert len(gzip.compress(text, 5)) <= 60_000
    assert len(gzip.compress(heads, 5)) <= 120_000 < len(heads)
    highest = found["sharp_attention_most_dispersed_normalized_entropy"].samples
    assert len(highest) == 16
    every = families(heads.decode())["sharp_attention_normalized_entropy"].samples
    values = {(sample.labels["layer"], sample.labels["head"]): sample.value for sample in every}
    expected = sorted(values.items(), key=lambda entry: -entry[1])[:16]
    assert {(sample.labels["layer"], sample.labels["head"]): sample.value for sample in highest} == dict(expected)


def report(rows):
    from sharp.serving.engine.report import Tally

    tally = Tally()
    tally.attention.append(rows)
    made = tally.report(0, 0, 0.0)
    assert isinstance(made, EngineReport)
    return made
