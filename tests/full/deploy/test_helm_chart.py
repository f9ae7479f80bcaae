"""The Helm chart is what the generator writes, and Helm renders the chart to what kustomize renders.

Helm's own library does the rendering, from the package helm-python-sdk in `build/helm` (`make deploy-tools`).
"""

import json
import re
import sys

import pytest
import yaml

from deploy.kubernetes.helm_chart import CHART, files, templates
from deploy.kubernetes.helm_values import CHOICES
from tests.full.deploy.policies import POLICIES
from tests.full.deploy.policies.documents import of_kind, pods
from tests.full.deploy.policies.pods import VERSION
from tests.full.deploy.rendering import (
    COMBINATIONS,
    ROOT,
    documents,
    render,
    without_hash,
    write_kustomization,
)

HELM = ROOT / "build" / "helm"
LINT_WARNING = 2
# Values that a chart has no default for.
GIVEN = {
    "url": {"url": "https://models.example.com/m.tar.gz", "sha256": "0" * 64},
    "hub": {"id": "people/tiny@v1", "options": "--norm entmax"},
}
ALWAYS = {"model-from-hub", "model-from-image-volume", "inference-pool"}
SAMPLE = [*COMBINATIONS[::7], *(parts for parts in COMBINATIONS if ALWAYS & set(parts))]
# Unlike an overlay of kustomize, a release is compared with the example of KEDA in the namespace that the query names.
NAMESPACE = "sharp"


@pytest.fixture(scope="session")
def helm():
    """Return Helm's library for Python, or skip the test, in CI too."""
    if not HELM.exists():
        pytest.skip("Helm's library is not there; get it with: make deploy-tools")
    sys.path.append(str(HELM))
    return pytest.importorskip("helm_python")


@pytest.fixture(scope="session")
def chart(helm):
    with helm.Chart.load(CHART) as loaded:
        yield loaded


def helm_documents(chart, values, name="r"):
    """Return the documents of a release, with values as `model.from` for nested fields."""
    nested: dict = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    rendered = chart.render(nested, name=name, namespace=NAMESPACE)
    found = [document for _, text in sorted(rendered.items()) for document in documents(text) if document is not None]
    for document in found:  # Helm puts them there
        document["metadata"]["namespace"] = NAMESPACE
    return found


def values_of(parts):
    """Return the chart's values for a combination of components."""
    chosen = {}
    for name, options in CHOICES.items():
        fitting = [option for option, components in options.items() if set(components) <= set(parts)]
        chosen[name] = max(fitting, key=lambda option: len(options[option]))
    return chosen | {f"model.{name}": value for name, value in GIVEN.get(chosen["model.from"], {}).items()}


def canonical(part):
    return json.dumps(part, sort_keys=True)


def comparable(found):
    """Return documents by kind and name, without hashes of names, the order of lists and the chart's own annotation."""

    def plain(part):
        if isinstance(part, dict):
            return {key: plain(value) for key, value in part.items() if key not in ("namespace", "annotations")}
        if isinstance(part, list):
            return (
                sorted((plain(value) for value in part), key=canonical) if part and isinstance(part[0], dict) else part
            )
        return without_hash(part) if isinstance(part, str) and part.startswith("r-sharp") else part

    return {(document["kind"], without_hash(document["metadata"]["name"])): plain(document) for document in found}


def test_the_chart_is_what_the_generator_writes():
    written = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
    assert written == templates(), "run python -m deploy.kubernetes.helm_chart"
    assert {path.name: path.resolve() for path in (CHART / "files").iterdir()} == files()
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (version["version"], version["appVersion"]) == (VERSION, VERSION)


def test_helm_finds_no_fault(helm):
    report = helm.lint(CHART, strict=True, kube_version="v1.30.0")
    assert [message for message in report["messages"] if message["severity"] >= LINT_WARNING] == []
    assert report["errors"] == []


def test_helm_renders_what_kustomize_renders(chart, tmp_path):
    """Every seventh combination of components, and all with a component of ALWAYS, are rendered by both."""
    for number, parts in enumerate(SAMPLE):
        data = {f"MODEL_{name.upper()}": value for name, value in GIVEN.get(values_of(parts)["model.from"], {}).items()}
        patch = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "sharp-model"}, "data": data}
        write_kustomization(
            tmp_path / str(number),
            parts,
            namespace=f"combination-{number}",
            namePrefix="r-",
            labels=[{"pairs": {"app.kubernetes.io/instance": "r"}, "includeSelectors": True}],
            patches=[{"patch": yaml.safe_dump(patch)}] if data else [],
        )
    whole = {"resources": [str(number) for number in range(len(SAMPLE))]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    by_number = {number: [] for number in range(len(SAMPLE))}
    for document in render(tmp_path):
        by_number[int(document["metadata"]["namespace"].rpartition("-")[2])].append(document)
    for number, parts in enumerate(SAMPLE):
        assert comparable(helm_documents(chart, values_of(parts))) == comparable(by_number[number]), parts


@pytest.mark.parametrize("name", POLICIES)
def test_releases_keep_to(name, chart):
    for parts in SAMPLE:
        assert POLICIES[name](helm_documents(chart, values_of(parts))) == [], parts


def test_values_reach_the_manifests(chart):
    values = {
        "replicas": 3,
        "image.repository": "registry.example.com/sharp",
        "model.version": "0123456789ab",
        "model.existingClaim": "weights",
        "auth.existingSecret": "tokens",
        "settings": {"SHARP_MAX_SEQUENCES": 8, "SHARP_LOG_PROMPTS": True},
        "resources": {"limits": {"cpu": "1"}},
        "tolerations": [{"key": "models"}],
        "imagePullSecrets": [{"name": "registry"}],
    }
    found = helm_documents(chart, values)
    (deployment,), (pod,) = of_kind(found, "Deployment"), pods(found)
    assert deployment["spec"]["replicas"] == 3
    assert pod.labels["sharp-model-version"] == "0123456789ab"
    assert pod.server["image"] == f"registry.example.com/sharp:{VERSION}-cpu"
    assert pod.server["resources"] == {"limits": {"cpu": "1"}}
    assert pod.spec["tolerations"] == [{"key": "models"}]
    (account,) = of_kind(found, "ServiceAccount")
    assert account["imagePullSecrets"] == [{"name": "registry"}]
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    assert volumes["model"]["persistentVolumeClaim"]["claimName"] == "weights"
    assert volumes["auth"]["secret"]["secretName"] == "tokens"
    variables = {variable["name"]: variable.get("value") for variable in pod.server["env"]}
    assert (variables["SHARP_MAX_SEQUENCES"], variables["SHARP_LOG_PROMPTS"]) == ("8", "true")


def test_a_digest_takes_the_place_of_a_tag(chart):
    digests = [f"sha256:{number}{'0' * 63}" for number in range(3)]
    values = {
        "image.tag": "0.2.0-cpu",
        "image.digest": digests[0],
        "model.from": "image-volume",
        "model.image.digest": digests[1],
        "inferencePool.enabled": True,
        "inferencePool.endpointPicker.image.digest": digests[2],
        "inferencePool.gateway.namespace": "gateways",
    }
    found = helm_documents(chart, values)
    server, picker = sorted(pods(found), key=lambda pod: pod.is_picker)
    assert server.server["image"] == f"sharp@{digests[0]}"
    (volume,) = (volume for volume in server.spec["volumes"] if volume["name"] == "model")
    assert volume["image"]["reference"] == f"sharp-model@{digests[1]}"
    assert picker.server["image"] == f"ghcr.io/llm-d/llm-d-router-endpoint-picker@{digests[2]}"
    (route,) = of_kind(found, "HTTPRoute")
    (parent,) = route["spec"]["parentRefs"]
    assert (parent["name"], parent["namespace"]) == ("inference-gateway", "gateways")


def test_changed_values_restart_the_servers_and_a_number_of_replicas_does_not(chart):
    def annotations(**values):
        (deployment,) = of_kind(helm_documents(chart, values), "Deployment")
        return deployment["spec"]["template"]["metadata"]["annotations"]

    assert annotations() == annotations(replicas=5) != annotations(settings={"SHARP_MAX_SEQUENCES": 8})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hardware": "tpu"}, "hardware"),
        ({"model.from": "url"}, "sha256"),
        ({"model.from": "hub"}, "id"),
        ({"model.version": "v1"}, "version"),
        ({"settings": {"MAX_SEQUENCES": 8}}, "invalid propertyName 'MAX_SEQUENCES'"),
        ({"replicaCount": 3}, "replicaCount"),
        ({"image.digest": "1234"}, "digest"),
        ({"tls.enabled": True, "inferencePool.enabled": True}, "tls"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_wrong_values_are_refused(helm, chart, values, expected):
    with pytest.raises(helm.HelmError, match=re.escape(expected)):
        helm_documents(chart, values)
