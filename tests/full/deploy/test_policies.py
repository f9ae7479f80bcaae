"""Every policy finds the error that it is for."""

import copy

import pytest

from tests.full.deploy.policies import POLICIES
from tests.full.deploy.policies.documents import of_kind
from tests.full.deploy.policies.pods import VERSION
from tests.full.deploy.rendering import render, write_kustomization


def set_at(kind, path, value, number=0):
    """Return a function that sets the field at `path` of a document of `kind`, or removes it with None.

    The document is the first of its kind, or that with `number`.
    """

    def damage(documents):
        place = of_kind(documents, kind)[number]
        *parents, last = (int(part) if part.isdigit() else part.replace("~", "/") for part in path.split("/"))
        for part in parents:
            place = place[part]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return damage


def pod(path, value):
    return set_at("Deployment", f"spec/template/spec/{path}", value)


def server(path, value):
    return pod(f"containers/0/{path}", value)


def setting(name, value):
    def damage(documents):
        (settings,) = (document for document in of_kind(documents, "ConfigMap") if "SHARP_HOST" in document["data"])
        settings["data"][name] = value
        if value is None:
            del settings["data"][name]

    return damage


COUNTEREXAMPLES = [
    ("restricted_pods", pod("securityContext/runAsNonRoot", False), "may run as root"),
    ("restricted_pods", server("securityContext/runAsUser", 0), "may run as root"),
    ("restricted_pods", pod("securityContext/seccompProfile", None), "no seccomp profile"),
    ("restricted_pods", server("securityContext/allowPrivilegeEscalation", None), "may gain privileges"),
    ("restricted_pods", pod("initContainers/0/securityContext/capabilities", None), "has capabilities"),
    ("restricted_pods", server("securityContext/capabilities/add", ["NET_ADMIN"]), "has capabilities"),
    ("restricted_pods", server("securityContext/readOnlyRootFilesystem", False), "can write to its image"),
    ("restricted_pods", pod("hostNetwork", True), "has hostNetwork"),
    ("restricted_pods", pod("volumes/0", {"name": "x", "hostPath": {"path": "/"}}), "is hostPath"),
    ("no_cluster_access", pod("automountServiceAccountToken", None), "service-account token"),
    ("no_cluster_access", pod("enableServiceLinks", None), "SHARP_GRPC_PORT"),
    ("resources_are_set", server("resources/limits/memory", None), "no limits of memory"),
    ("resources_are_set", pod("initContainers/0/resources", None), "no requests of cpu"),
    ("resources_are_set", server("resources/limits/nvidia.com~gpu", "2"), "other GPUs"),
    ("copies_fit_the_disk", server("resources/limits/ephemeral-storage", "1Gi"), "would be evicted"),
    ("copies_fit_the_disk", pod("volumes/0", {"name": "x", "emptyDir": {}}), "no size limit"),
    ("probes_ask_the_server", server("startupProbe", None), "no startupProbe"),
    ("probes_ask_the_server", server("livenessProbe", {"grpc": {"port": 50051}}), "without TLS"),
    ("probes_ask_the_server", server("readinessProbe/httpGet/scheme", "HTTP"), "asks over HTTP"),
    ("probes_ask_the_server", server("readinessProbe/httpGet/path", "/healthz"), "/healthz"),
    ("probes_ask_the_server", server("readinessProbe/httpGet/port", "grpc"), "on grpc"),
    ("probes_ask_the_server", setting("SHARP_HOST", "127.0.0.1"), "where nobody can ask"),
    ("probes_ask_the_server", setting("SHARP_GRPC_PORT", "50052"), "does not listen"),
    ("probes_ask_the_server", setting("SHARP_TLS_CLIENT_CA", "/etc/sharp/tls/ca.crt"), "no certificate to show"),
    ("the_start_has_time", set_at("Deployment", "spec/progressDeadlineSeconds", None), "counts as failed"),
    ("the_start_has_time", server("startupProbe/failureThreshold", 12), "has 60 s to load"),
    ("the_end_has_time", pod("terminationGracePeriodSeconds", 79), "needs 80 s"),
    ("the_end_has_time", setting("SHARP_GRACE_SECONDS", "600"), "needs 620 s"),
    ("the_end_has_time", server("lifecycle", None), "does not wait"),
    ("settings_exist", setting("SHARP_GRACE", "5"), "SHARP_GRACE is no setting"),
    ("settings_exist", setting("SHARP_GRACE_SECONDS", "a minute"), "grace_seconds"),
    ("settings_exist", setting("SHARP_TLS_KEY", None), "needs both tls_cert and tls_key"),
    ("settings_exist", server("args", ["/model", "--grace=5"]), "--grace is no flag"),
    ("volumes_are_there", server("volumeMounts/0/name", "elsewhere"), "elsewhere, which is no volume"),
    ("volumes_are_there", pod("volumes/0/secret/defaultMode", 0o444), "everybody can read"),
    ("volumes_are_there", server("volumeMounts/0/mountPath", "/tls"), "/etc/sharp/tls/tls.crt is in no volume"),
    ("volumes_are_there", server("volumeMounts/0/subPath", "tls.crt"), "does not arrive"),
    (
        "volumes_are_there",
        server("env", [{"name": "SHARP_TOKEN", "valueFrom": {"secretKeyRef": {}}}]),
        "secret in the environment",
    ),
    ("selectors_find_the_pods", set_at("Service", "spec/selector", {}), "selects every pod"),
    ("selectors_find_the_pods", set_at("NetworkPolicy", "spec/podSelector", {}), "selects every pod"),
    ("selectors_find_the_pods", set_at("PodMonitor", "spec/selector/matchLabels/app", "sharp"), "selects no pod"),
    ("selectors_find_the_pods", pod("topologySpreadConstraints/0/labelSelector", {}), "selects every pod"),
    ("references_exist", server("envFrom/0/configMapRef/name", "settings"), "names ConfigMap settings"),
    ("references_exist", set_at("Service", "spec/ports/0/targetPort", "grpcs"), "the port grpcs"),
    ("references_exist", set_at("PodMonitor", "spec/podMetricsEndpoints/0/port", "metrics"), "the port metrics"),
    ("references_exist", set_at("ScaledObject", "spec/scaleTargetRef/name", "server"), "names Deployment server"),
    ("references_exist", pod("serviceAccountName", "default"), "names ServiceAccount default"),
    ("one_owner_of_replicas", set_at("Deployment", "spec/replicas", 2), "every apply would reset"),
    ("one_owner_of_replicas", lambda documents: documents.extend(of_kind(documents, "ScaledObject")), "several"),
    ("one_owner_of_replicas", set_at("ScaledObject", "spec/scaleTargetRef/name", "other"), "has one replica"),
    ("busy_servers_are_kept", setting("SHARP_MAX_SEQUENCES", "48"), "at most 48 requests"),
    ("busy_servers_are_kept", set_at("ScaledObject", "spec/triggers/1", None), "when nothing waits"),
    ("prometheus_can_read", set_at("PodMonitor", "spec/jobLabel", None), "SharpDown would never fire"),
    ("prometheus_can_read", set_at("PodMonitor", "spec/podMetricsEndpoints/0/scheme", "http"), "serves https"),
    ("prometheus_can_read", set_at("PodMonitor", "spec/podMetricsEndpoints/0/path", "/stats"), "asks for /stats"),
    ("prometheus_can_read", set_at("NetworkPolicy", "spec/ingress/1", None), "keeps Prometheus out"),
    (
        "prometheus_can_read",
        lambda documents: documents.remove(of_kind(documents, "PodMonitor")[0]),
        "does not read these servers",
    ),
    ("queries_name_the_namespace", set_at("ScaledObject", "metadata/namespace", "other"), "of the namespace"),
    ("images_are_pinned", server("image", "sharp:latest"), "not of version"),
    ("images_are_pinned", server("image", "registry.example.com:5000/sharp"), "not of version"),
    ("images_are_pinned", server("image", f"sharp:{VERSION}-cpu"), "with a GPU"),
    ("gpus_are_used", setting("SHARP_DEVICE", None), "has a GPU and SHARP_DEVICE=auto"),
    ("tokens_are_required", setting("SHARP_TOKEN_FILE", None), "serves whoever reaches it"),
    ("only_named_clients_are_admitted", set_at("NetworkPolicy", "spec/ingress/0/from", None), "admits whoever"),
    (
        "only_named_clients_are_admitted",
        set_at("NetworkPolicy", "spec/ingress/0/from/0/podSelector", {}),
        "admits whoever",
    ),
    ("interruptions_are_limited", set_at("PodDisruptionBudget", "spec/maxUnavailable", 0), "no node be drained"),
    ("interruptions_are_limited", set_at("PodDisruptionBudget", "kind", "Other"), "no PodDisruptionBudget"),
    ("interruptions_are_limited", set_at("NetworkPolicy", "spec/policyTypes", ["Ingress"]), "is open"),
    ("interruptions_are_limited", pod("topologySpreadConstraints", []), "on one node"),
    (
        "interruptions_are_limited",
        set_at("Deployment", "spec/strategy/rollingUpdate/maxUnavailable", 1),
        "before there are new ones",
    ),
]


def of_ray(group, path, value):
    return set_at("RayService", f"spec/rayClusterConfig/{group}/template/{path}", value)


HEAD, WORKERS = "headGroupSpec", "workerGroupSpecs/0"
COUNTEREXAMPLES_OF_RAY = [
    ("rays_pods_have_probes", of_ray(HEAD, "spec/containers/0/livenessProbe", None), "head has no livenessProbe"),
    (
        "rays_pods_have_probes",
        of_ray(WORKERS, "spec/containers/0/readinessProbe", {"exec": {"command": ["wget"]}}),
        "replicas has no readinessProbe",
    ),
    ("selectors_find_the_pods", of_ray(WORKERS, "metadata/labels/app.kubernetes.io~component", "x"), "selects no pod"),
    (
        "selectors_find_the_pods",
        set_at("NetworkPolicy", "spec/ingress/0/from/0/podSelector/matchLabels/app.kubernetes.io~name", "sharp"),
        "selects no pod",
    ),
    (
        "prometheus_can_read",
        of_ray(WORKERS, "metadata/labels/app.kubernetes.io~component", "sharp"),
        "SharpDown would fire when Ray",
    ),
    (
        "workers_of_ray_are_kept",
        set_at("PodDisruptionBudget", "spec/selector/matchLabels/app.kubernetes.io~component", None),
        "includes the head",
    ),
    ("workers_of_ray_are_kept", set_at("PodDisruptionBudget", "kind", "Other"), "all replicas may be taken away"),
    ("workers_of_ray_are_kept", set_at("PodDisruptionBudget", "spec/minAvailable", "50%"), "in minAvailable"),
]


def picker(path, value):
    return set_at("Deployment", f"spec/template/{path}", value, number=1)


ARGUMENTS = "spec/containers/0/args"
COUNTEREXAMPLES_OF_POOLS = [
    ("restricted_pods", picker("spec/containers/0/securityContext/readOnlyRootFilesystem", None), "epp can write"),
    ("resources_are_set", picker("spec/containers/0/resources/limits/cpu", None), "epp has no limits of cpu"),
    ("images_are_pinned", picker("spec/containers/0/image", "ghcr.io/llm-d/picker:main"), "epp runs"),
    ("pickers_only_read", set_at("Role", "rules/0/verbs", ["get", "list", "watch", "delete"]), "may do more than read"),
    ("pickers_only_read", set_at("Role", "rules/0/resources", ["pods", "secrets"]), "may read secrets"),
    ("pickers_only_read", set_at("Role", "rules/0/resources", ["services"]), "may not watch pods"),
    ("pickers_only_read", set_at("Role", "kind", "ClusterRole"), "rights in the whole cluster"),
    ("pickers_only_read", set_at("RoleBinding", "subjects/0/name", "default"), "may not watch inferencepools"),
    ("pickers_only_read", picker("spec/automountServiceAccountToken", False), "has no token"),
    ("pools_have_a_picker", set_at("InferencePool", "spec/endpointPickerRef/name", "epp"), "names the Service epp"),
    ("pools_have_a_picker", set_at("InferencePool", "spec/endpointPickerRef/port/number", 9003), "names the port 9003"),
    ("pools_have_a_picker", set_at("InferencePool", "spec/targetPorts/0/number", 50051), "cannot reach the servers"),
    ("pools_have_a_picker", picker("metadata/labels/app.kubernetes.io~name", "epp"), "selects 0 pickers"),
    ("pools_have_a_picker", picker("metadata/labels/sharp-client", None), "keeps sharp-epp out"),
    ("pools_have_a_picker", picker(f"{ARGUMENTS}/1", "other"), "watches the pool other, not sharp"),
    ("pools_have_a_picker", picker(f"{ARGUMENTS}/2", "--config-file=/config/config.yaml"), "is in no ConfigMap"),
    ("pools_have_a_picker", set_at("NetworkPolicy", "spec/podSelector/matchLabels/x", "y", 1), "has no NetworkPolicy"),
]
EXAMPLES = {"gpu": COUNTEREXAMPLES, "ray": COUNTEREXAMPLES_OF_RAY, "inference-pool": COUNTEREXAMPLES_OF_POOLS}


@pytest.mark.parametrize(
    ("overlay", "name", "damage", "expected"),
    [(overlay, *example) for overlay, examples in EXAMPLES.items() for example in examples],
)
def test_a_policy_finds(overlay, name, damage, expected, overlays):
    documents = copy.deepcopy(overlays[overlay])
    assert POLICIES[name](documents) == []
    damage(documents)
    problems = POLICIES[name](documents)
    assert any(expected in problem for problem in problems), problems


def test_every_policy_has_a_counterexample():
    assert {name for examples in EXAMPLES.values() for name, _, _ in examples} == set(POLICIES)


def test_the_wrong_order_of_components_is_found(tmp_path):
    """TLS after monitoring is the right order of components, because TLS changes the scheme that Prometheus uses."""
    wrong = render(write_kustomization(tmp_path, ["cpu", "model-from-pvc", "tls", "monitoring"]))
    assert POLICIES["prometheus_can_read"](wrong) == ["Prometheus asks over http; the server serves https"]
