"""The manifests render in every combination, to documents that are valid and obey our policies."""

import copy
import json
import re

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as kubernetes_schemas

from deploy.kubernetes.prometheus_rule import WRITTEN, prometheus_rule
from tests.full.deploy import custom_resources
from tests.full.deploy.policies import POLICIES
from tests.full.deploy.policies.documents import of_kind, pods
from tests.full.deploy.policies.pods import VERSION
from tests.full.deploy.policies.references import selectors_find_the_pods
from tests.full.deploy.rendering import (
    COMBINATIONS,
    KUBERNETES,
    ROOT,
    kubectl,
    render,
    without_hash,
    write_kustomization,
)

# From the oldest version that has every field we use (a disruption budget's unhealthyPodEvictionPolicy and gRPC probes
# are beyond alpha since 1.27) to the newest version that the package knows.
VERSIONS = [f"1.{minor}" for minor in range(27, 38)]


IMAGE_VOLUMES = "1.33"  # the first version whose pod security standard "restricted" allows image volumes
# Combinations are rendered in namespaces that exist only in the tests.
OF_OVERLAYS_ONLY = {"queries_name_the_namespace"}


@pytest.fixture(scope="module")
def unlike(rendered):
    """Return every distinct document once, because combinations share most of their documents."""
    return {
        json.dumps(document | {"metadata": document["metadata"] | {"namespace": "sharp"}}, sort_keys=True): document
        for documents in rendered.values()
        for document in documents
    }.values()


def is_custom(document):
    return (document["apiVersion"], document["kind"]) in custom_resources.SPECS


def minor(version):
    return int(version.partition(".")[2])


def has_image_volume(document):
    return any("image" in volume for pod in pods([document]) for volume in pod.spec.get("volumes", []))


@pytest.fixture
def schemas_in_memory(monkeypatch):
    """Keep schemas in memory, because the package reads a file of 1 MB for every document."""
    read = kubernetes_schemas.schema_contents
    known = {}

    def contents(name, version):
        if name not in known:
            known[name] = read(name, version)
        return known[name]

    monkeypatch.setattr(kubernetes_schemas, "schema_contents", contents)


def test_every_component_is_in_a_combination(rendered, overlays):
    components = {path.name for path in (KUBERNETES / "components").iterdir()}
    assert components == {name for parts in COMBINATIONS for name in parts} | {"namespace"}
    assert {"cpu", "gpu", "kserve", "inference-pool", "ray"} == set(overlays)
    assert len(rendered) == len(COMBINATIONS) + len(overlays)
    assert all(rendered.values())


@pytest.mark.parametrize("name", POLICIES)
def test_manifests_keep_to(name, combinations, overlays):
    checked = overlays if name in OF_OVERLAYS_ONLY else combinations | overlays
    found = {which: POLICIES[name](documents) for which, documents in checked.items()}
    assert {which: problems for which, problems in found.items() if problems} == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_them(unlike, version, schemas_in_memory):
    checked = set()
    for document in unlike:
        if not is_custom(document) and (minor(version) >= minor(IMAGE_VOLUMES) or not has_image_volume(document)):
            used = kubernetes_validate.validate(document, version, strict=True)
            assert used == version
            checked.add(document["kind"])
    assert checked == {
        *("ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Namespace", "NetworkPolicy"),
        *("PodDisruptionBudget", "Role", "RoleBinding", "Service", "ServiceAccount"),
    }


def test_pods_of_kserve_are_pods(overlays, schemas_in_memory):
    (pod,) = pods(overlays["kserve"])
    own = {
        "supportedModelFormats",
        "protocolVersions",
        "multiModel",
        "annotations",
        "model",
        "minReplicas",
        "maxReplicas",
    }
    spec = {name: value for name, value in pod.spec.items() if name not in own}
    for version in VERSIONS:
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "sharp"}, "spec": spec}, version, strict=True
        )


def test_what_a_ray_service_holds_is_valid(overlays, schemas_in_memory):
    parts = [{"kind": "Pod", "metadata": {"name": pod.name}, "spec": pod.spec} for pod in pods(overlays["ray"])]
    assert len(parts) == 2
    for part in parts:
        for version in VERSIONS:
            kubernetes_validate.validate({"apiVersion": "v1"} | part, version, strict=True)


def test_a_fault_is_found(overlays):
    (deployment,) = of_kind(overlays["cpu"], "Deployment")
    for damage in ({"livenessProb": {}}, {"ports": [{"containerPort": "grpc"}]}, {"image": ["sharp"]}):
        damaged = copy.deepcopy(deployment)
        damaged["spec"]["template"]["spec"]["containers"][0] |= damage
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(damaged, VERSIONS[0], strict=True)


def test_custom_resources_have_the_fields_of_their_definitions(unlike):
    seen = set()
    for document in unlike:
        if is_custom(document):
            kind = (document["apiVersion"], document["kind"])
            jsonschema.validate(document, custom_resources.schema(*kind))
            seen.add(kind)
    assert seen == set(custom_resources.SPECS)


@pytest.mark.parametrize(
    ("overlay", "kind", "path", "value"),
    [
        ("gpu", "PodMonitor", "spec.selector", {"matchLabels": {}}),
        ("gpu", "PodMonitor", "spec.podMetricsEndpoints.0.schema", "https"),
        ("gpu", "PrometheusRule", "spec.groups.0.rules.0.alert", "Both"),
        ("gpu", "ScaledObject", "spec.triggers.0.metadata.threshold", 4),
        ("gpu", "ScaledObject", "spec.scaleTarget", {}),
        ("kserve", "ServingRuntime", "spec.protocolVersions.0", "grpc"),
        ("kserve", "InferenceService", "spec.predictor.model.modelFormat", "sharp"),
        ("ray", "RayService", "spec.rayClusterConfig.workerGroupSpecs.0.maxReplicas", "4"),
        ("ray", "RayService", "spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus", 0),
        ("ray", "RayService", "spec.serveService", {"spec": {"ports": [{"name": "grpc", "port": 50051}]}}),
        ("inference-pool", "InferencePool", "spec.targetPorts.0.number", "http"),
        ("inference-pool", "HTTPRoute", "spec.rules.0.backendRefs.0.port", 8000),
    ],
)
def test_a_fault_in_a_custom_resource_is_found(overlays, overlay, kind, path, value):
    (document,) = copy.deepcopy(of_kind(overlays[overlay], kind))
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place = document
    for part in parents:
        place = place[part]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, custom_resources.schema(document["apiVersion"], kind))


def test_the_prometheus_rule_is_written_from_our_rules():
    assert WRITTEN.read_text() == prometheus_rule(), "run deploy/kubernetes/prometheus_rule.py"
    ours = [
        rule
        for name in ("recording.yml", "alerts.yml")
        for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / name).read_text())["groups"]
        for rule in group["rules"]
    ]
    groups = yaml.safe_load(WRITTEN.read_text())["spec"]["groups"]
    assert [rule for group in groups for rule in group["rules"]] == ours
    assert len({group["name"] for group in groups}) == len(groups)


def test_the_dashboards_are_ours(overlays):
    boards = [
        document
        for document in of_kind(overlays["gpu"], "ConfigMap")
        if document["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
    ]
    found = {name: json.loads(text) for board in boards for name, text in board["data"].items()}
    assert found == {path.name: json.loads(path.read_text()) for path in (ROOT / "deploy" / "grafana").glob("*.json")}


def test_changed_settings_restart_the_servers(tmp_path):
    def name(literal):
        folder = write_kustomization(
            tmp_path / literal,
            ["cpu", "model-from-pvc"],
            configMapGenerator=[{"name": "sharp", "behavior": "merge", "literals": [literal]}],
        )
        (pod,) = pods(render(folder))
        return pod.server["envFrom"][0]["configMapRef"]["name"]

    first, second = name("SHARP_MAX_SEQUENCES=8"), name("SHARP_MAX_SEQUENCES=16")
    assert without_hash(first) == without_hash(second) == "sharp"
    assert first != second


def test_two_models_live_in_one_namespace(tmp_path):
    """Two models with different name prefixes and labels never select or name each other's resources."""
    folders = [
        write_kustomization(
            tmp_path / name,
            ["cpu", "model-from-pvc", "autoscale-hpa", "monitoring"],
            namespace="sharp",
            namePrefix=f"{name}-",
            labels=[{"pairs": {"app.kubernetes.io/instance": name}, "includeSelectors": True}],
        )
        for name in ("large", "small")
    ]
    rendered = [render(folder) for folder in folders]
    names = [{(document["kind"], document["metadata"]["name"]) for document in documents} for documents in rendered]
    assert not names[0] & names[1]
    for mine, other in (rendered, reversed(rendered)):
        assert selectors_find_the_pods(mine) == []
        alien = of_kind(other, "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor")
        deployment = of_kind(mine, "Deployment")
        assert len(selectors_find_the_pods([*deployment, *alien])) == len(alien)
        (scaler,) = of_kind(mine, "HorizontalPodAutoscaler")
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment[0]["metadata"]["name"]


@pytest.mark.parametrize("other", ["cpu", "gpu", "inference-pool"])
def test_ray_and_another_overlay_live_in_one_namespace(overlays, other):
    """Ray and another overlay do not select each other's pods, and share no name but the namespace's."""
    both = [overlays["ray"], overlays[other]]
    names = [{(document["kind"], document["metadata"]["name"]) for document in documents} for documents in both]
    assert names[0] & names[1] == {("Namespace", "sharp")}
    for mine, alien in (both, reversed(both)):
        holders = of_kind(mine, "Deployment", "RayService")
        selecting = of_kind(alien, "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "InferencePool")
        named = {problem.removesuffix(" selects no pod") for problem in selectors_find_the_pods([*holders, *selecting])}
        assert named == {f"{document['kind']} {document['metadata']['name']}" for document in selecting}


def test_keda_follows_a_prefixed_name(tmp_path):
    parts = ["cpu", "model-from-pvc", "monitoring", "autoscale-keda"]
    folder = write_kustomization(tmp_path, parts, namePrefix="small-")
    (scaler,) = of_kind(render(folder), "ScaledObject")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "small-sharp"


def test_the_base_alone_is_refused():
    """The base alone has no volume with a model, so the API server refuses it.

    Otherwise the server would crash again and again.
    """
    (pod,) = pods(render(KUBERNETES / "base"))
    mounted = {mount["name"] for mount in pod.server["volumeMounts"]}
    assert mounted - {volume["name"] for volume in pod.spec["volumes"]} == {"model"}


def test_a_component_that_is_not_there_is_an_error(tmp_path):
    result = kubectl("kustomize", write_kustomization(tmp_path, ["unheard-of"]))
    assert result.returncode != 0
    assert "unheard-of" in result.stderr


def test_the_version_is_that_of_the_package():
    texts = "".join(path.read_text() for path in KUBERNETES.rglob("*.yaml"))
    named = re.findall(r"(?:image: sharp[\w-]*:|newTag: )(\d[\w.]*)", texts)
    assert set(named) == {VERSION}
    assert len(named) >= 5
