"""The parts of the overlays that the Gateway API's endpoint picker and KServe read have their published names.

The picker's names are those of the Inference Extension's model server protocol (proposal 003) and of the parameters of
its plugins; KServe's annotations are those of its own runtimes.
"""

import urllib.request

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sharp.serving.observability.metrics import VLLM
from sharp.serving.server.settings_sources import ServeSettings
from tests.full.deploy.policies.documents import of_kind, servers, settings

# The protocol's metrics, the parameter that names each of them to the picker, and the name in vLLM.
PROTOCOL = {
    "TotalQueuedRequests": ("queuedRequestsSpec", "vllm:num_requests_waiting"),
    "TotalRunningRequests": ("runningRequestsSpec", "vllm:num_requests_running"),
    "KVCacheUtilization": ("kvUsageSpec", "vllm:kv_cache_usage_perc"),
}
PLUGINS = {
    *("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer"),
    *("metrics-data-source", "core-metrics-extractor"),
}


@pytest.fixture
def configuration(overlays):
    """Return the picker's configuration in the overlay."""
    maps = {found["metadata"]["name"]: found["data"] for found in of_kind(overlays["inference-pool"], "ConfigMap")}
    return yaml.safe_load(maps["sharp-epp"]["endpoint-picker.yaml"])


def parameters(configuration, kind):
    (found,) = (plugin for plugin in configuration["plugins"] if plugin["type"] == kind)
    return found["parameters"]


def test_the_pickers_configuration_has_the_published_fields(configuration):
    assert configuration["kind"] == "EndpointPickerConfig"
    assert configuration["apiVersion"] == "inference.networking.x-k8s.io/v1alpha1"
    assert {plugin["type"] for plugin in configuration["plugins"]} == PLUGINS
    (profile,) = configuration["schedulingProfiles"]
    scorers = {plugin["pluginRef"] for plugin in profile["plugins"]}
    (source,) = configuration["dataLayer"]["sources"]
    named = scorers | {source["pluginRef"]} | {found["pluginRef"] for found in source["extractors"]}
    assert named == PLUGINS
    extractor = parameters(configuration, "core-metrics-extractor")
    (engine,) = extractor["engineConfigs"]
    assert engine.keys() == {"name"} | {field for field, _ in PROTOCOL.values()}
    assert extractor["defaultEngine"] == engine["name"]


def test_the_picker_finds_the_metrics_of_a_server(configuration, counting, start_server, overlays):
    """A server has a gauge for every metric of the protocol, and vLLM's name is the gauge's alias."""
    started = start_server(counting)
    with urllib.request.urlopen(f"http://{started.http_address}/metrics", timeout=20) as response:
        families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    (engine,) = parameters(configuration, "core-metrics-extractor")["engineConfigs"]
    for field, theirs in PROTOCOL.values():
        ours = engine[field]
        assert families[ours].type == "gauge", ours
        assert [sample.value for sample in families[ours].samples] == [0.0], ours
        assert theirs in VLLM[ours]
    source = parameters(configuration, "metrics-data-source")
    (pod,) = servers(overlays["inference-pool"])
    assert (source["scheme"], source["path"]) == ("http", "/metrics")
    assert settings(overlays["inference-pool"], pod).tls_cert is None
    (pool,) = of_kind(overlays["inference-pool"], "InferencePool")
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [ServeSettings().http_port]


def test_kserve_finds_the_metrics_and_the_models(overlays):
    (runtime,), (service,) = (of_kind(overlays["kserve"], kind) for kind in ("ServingRuntime", "InferenceService"))
    (pod,) = servers(overlays["kserve"])
    chosen = settings(overlays["kserve"], pod)
    assert runtime["spec"]["annotations"] == {
        "prometheus.kserve.io/port": str(chosen.http_port),
        "prometheus.kserve.io/path": "/metrics",
    }
    assert service["metadata"]["annotations"]["serving.kserve.io/enable-prometheus-scraping"] == "true"
    (container,) = runtime["spec"]["containers"]
    assert (container["name"], container["args"]) == ("kserve-container", ["/mnt/models"])
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == ("h2c", chosen.grpc_port)
    model = service["spec"]["predictor"]["model"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert {"name", "version"} <= model["modelFormat"].keys()
    formats = [{key: found[key] for key in ("name", "version")} for found in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"] in formats
