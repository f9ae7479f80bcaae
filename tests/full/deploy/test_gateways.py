"""The parts of the overlays that the Gateway API's endpoint picker and KServe read have their published names.

The names of metrics are those of the Inference Extension's model server protocol (proposal 003). Facts of the endpoint
picker were read in the source of the llm-d router 0.10.0, and those of the InferencePool in the definition of the
Inference Extension 1.6.0. KServe's annotations, schemes and folders are those of its own runtimes and of KServe 0.20.
"""

import re
import urllib.request

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sharp.serving.observability.metrics import VLLM
from sharp.serving.server.settings_sources import ServeSettings
from tests.full.deploy.policies import POLICIES
from tests.full.deploy.policies.documents import of_kind, pods, servers, settings
from tests.full.deploy.rendering import ROOT, render, write_kustomization

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
# The router's pkg/epp/server/options.go and logging/options.go: flags that we use, with their defaults.
FLAGS = {
    "--pool-name": "",
    "--config-file": "",
    "--zap-encoder": "console",
    "--metrics-endpoint-auth": "true",
    "--enable-pprof": "true",
    "--tracing": "true",
}
# The same file: the ports of the picker unless flags change them.
PORTS = {"grpc": 9002, "grpc-health": 9003, "metrics": 9090}
# cmd/epp/runner/health.go: the only service that the picker's health names with and without an election of a leader.
HEALTH = "envoy.service.ext_proc.v3.ExternalProcessor"
# cmd/epp/runner/runner.go: variables that the picker reads, and config/charts: the fields of the pod in them.
VARIABLES = {"NAMESPACE": "metadata.namespace", "POD_NAME": "metadata.name"}
# config/charts, _rbac.yaml and rbac.yaml: the resources that the picker watches, by API group.
WATCHED = {
    "": {"pods"},
    "inference.networking.k8s.io": {"inferencepools"},
    "inference.networking.x-k8s.io": {"inferenceobjectives", "inferencemodelrewrites"},
    "llm-d.ai": {"inferenceobjectives", "inferencemodelrewrites"},
}
IMAGE = "ghcr.io/llm-d/llm-d-router-endpoint-picker:v0.10.0"
USER = 65532  # of Dockerfile.epp
# What a plugin takes: the picker refuses unknown parameters.
PARAMETERS = {
    "metrics-data-source": {
        *("scheme", "path", "port", "insecureSkipVerify", "caCertPath", "clientCertPath", "clientKeyPath", "interval"),
    },
    "core-metrics-extractor": {"engineLabelKey", "defaultEngine", "engineConfigs"},
}


@pytest.fixture
def configuration(overlays):
    """Return the picker's configuration in the overlay."""
    maps = [found["data"] for found in of_kind(overlays["inference-pool"], "ConfigMap")]
    (text,) = (data["endpoint-picker.yaml"] for data in maps if "endpoint-picker.yaml" in data)
    return yaml.safe_load(text)


@pytest.fixture
def picker(overlays):
    """Return the pod of the picker in the overlay."""
    (found,) = (pod for pod in pods(overlays["inference-pool"]) if pod.is_picker)
    return found


def parameters(configuration, kind):
    (found,) = (plugin for plugin in configuration["plugins"] if plugin["type"] == kind)
    return found["parameters"]


def test_the_pickers_configuration_has_the_published_fields(configuration):
    assert configuration["kind"] == "EndpointPickerConfig"
    assert configuration["apiVersion"] == "llm-d.ai/v1alpha1"
    assert configuration.keys() == {"apiVersion", "kind", "plugins", "schedulingProfiles", "dataLayer"}
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
    for plugin in configuration["plugins"]:
        assert plugin.get("parameters", {}).keys() <= PARAMETERS.get(plugin["type"], set()), plugin["type"]


def test_the_picker_starts_as_its_chart_starts_it(picker, overlays):
    words = [part for argument in picker.server["args"] for part in argument.split("=", 1)]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given.keys() == FLAGS.keys()
    assert all(value != FLAGS[name] for name, value in given.items())
    assert given["--zap-encoder"] == "json"
    assert {port["name"]: port["containerPort"] for port in picker.server["ports"]} == PORTS
    for kind in ("livenessProbe", "readinessProbe"):
        assert picker.server[kind]["grpc"] == {"port": PORTS["grpc-health"], "service": HEALTH}
    fields = {variable["name"]: variable["valueFrom"]["fieldRef"]["fieldPath"] for variable in picker.server["env"]}
    assert fields == VARIABLES
    assert (picker.server["image"], picker.spec["securityContext"]["runAsUser"]) == (IMAGE, USER)
    assert "command" not in picker.server
    grace = [pod.spec["terminationGracePeriodSeconds"] for pod in servers(overlays["inference-pool"])]
    assert picker.spec["terminationGracePeriodSeconds"] == 130 > max(grace)
    (deployment,) = (
        found for found in of_kind(overlays["inference-pool"], "Deployment") if found["metadata"]["name"] == picker.name
    )
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})


def test_the_picker_may_watch_what_it_watches(overlays):
    """The Role names the resources of the picker's own chart, and nothing more."""
    (role,) = of_kind(overlays["inference-pool"], "Role")
    found = {}
    for rule in role["rules"]:
        assert set(rule["verbs"]) == {"get", "list", "watch"}
        for group in rule["apiGroups"]:
            found[group] = found.get(group, set()) | set(rule["resources"])
    assert found == WATCHED
    (binding,) = of_kind(overlays["inference-pool"], "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "sharp-epp", "namespace": "sharp"}]


def test_the_gateway_finds_the_picker_and_the_pool(overlays):
    """The pool is of the API that gateways implement, and names the picker's Service and its port for ext_proc."""
    found = overlays["inference-pool"]
    (pool,), (route,) = of_kind(found, "InferencePool"), of_kind(found, "HTTPRoute")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"]["endpointPickerRef"] == {
        "name": "sharp-epp",
        "port": {"number": PORTS["grpc"]},
        "failureMode": "FailOpen",
    }
    (service,) = (each for each in of_kind(found, "Service") if each["metadata"]["name"] == "sharp-epp")
    ports = {
        port["name"]: (port["port"], port["targetPort"], port.get("appProtocol")) for port in service["spec"]["ports"]
    }
    assert ports == {
        "grpc-ext-proc": (PORTS["grpc"], "grpc", "kubernetes.io/h2c"),
        "http-metrics": (PORTS["metrics"], "metrics", None),
    }
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"], backend["name"]) == (
        "inference.networking.k8s.io",
        "InferencePool",
        "sharp",
    )


def test_a_prefix_and_a_label_reach_the_picker_and_the_pool(tmp_path):
    """Two pools in one namespace, with prefixes and labels of their own, keep apart."""
    labels = [{"pairs": {"app.kubernetes.io/instance": "small"}, "includeSelectors": True}]
    parts = ["cpu", "model-from-pvc", "inference-pool"]
    found = render(write_kustomization(tmp_path, parts, namespace="sharp", namePrefix="small-", labels=labels))
    assert POLICIES["pools_have_a_picker"](found) == POLICIES["pickers_only_read"](found) == []
    (pool,), (route,) = of_kind(found, "InferencePool"), of_kind(found, "HTTPRoute")
    assert pool["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "small"
    assert pool["spec"]["endpointPickerRef"]["name"] == "small-sharp-epp"
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"] == "small-sharp"


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
    # KServe 0.20 mounts /models of an image there, for oci+native:// as an image volume.
    assert re.search(r"^COPY \. /models$", (ROOT / "deploy" / "docker" / "model.Dockerfile").read_text(), re.M)
    model = service["spec"]["predictor"]["model"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert {"name", "version"} <= model["modelFormat"].keys()
    formats = [{key: found[key] for key in ("name", "version")} for found in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"] in formats
