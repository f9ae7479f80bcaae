"""What every rendered manifest must keep to. Each policy takes the documents and says what is wrong, in sentences."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sharp.serving.cli import serve
from sharp.serving.settings import KNOWN_VARIABLES, PREFIX, ServeSettings
from tests.deploy.rendering import ROOT, Document

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# What the end of a server takes beyond its drain: the last step and the last messages.
END_SECONDS = 10
LOAD_SECONDS = 600
JOB = "sharp"  # the alerts' up{job="sharp"}
HTTP_ROUTES = {"/health", "/metrics"}
# The volumes of the pod security standard "restricted".
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
HEAD = "head"  # of a Ray cluster: the one group of pods without a name
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
UNITS = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class Pod:
    """Pods as they will run: those of a Deployment, of an InferenceService with its runtime, or of a RayService."""

    name: str
    labels: dict[str, str]
    spec: dict[str, Any]
    of_ray: bool = False

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def server(self) -> dict[str, Any]:
        return self.spec["containers"][0]


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def pods(documents: list[Document]) -> Iterator[Pod]:
    for deployment in of_kind(documents, "Deployment"):
        template = deployment["spec"]["template"]
        yield Pod(deployment["metadata"]["name"], template["metadata"]["labels"], template["spec"])
    for service in of_kind(documents, "InferenceService"):
        predictor = service["spec"]["predictor"]
        runtime = next(
            one
            for one in of_kind(documents, "ServingRuntime")
            if one["metadata"]["name"] == predictor["model"]["runtime"]
        )
        yield Pod(service["metadata"]["name"], {}, runtime["spec"] | predictor)
    for service in of_kind(documents, "RayService"):
        cluster = service["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            name, template = group.get("groupName", HEAD), group["template"]
            yield Pod(name, template["metadata"]["labels"], template["spec"], of_ray=True)


def servers(documents: list[Document]) -> Iterator[Pod]:
    """Pods that run sharp-serve. Those of Ray run `ray start`; `rays_pods_have_probes` is for them."""
    return (pod for pod in pods(documents) if not pod.of_ray)


def quantity(value: Any) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(value)).groups()
    return float(number) * UNITS[unit]


def environment(documents: list[Document], container: dict[str, Any]) -> dict[str, str | None]:
    """The variables of a container; None stands for a value that is known in the cluster only."""
    maps = {one["metadata"]["name"]: one.get("data", {}) for one in of_kind(documents, "ConfigMap")}
    found: dict[str, str | None] = {}
    for source in container.get("envFrom", []):
        found |= maps.get(source["configMapRef"]["name"], {})
    return found | {one["name"]: one.get("value") for one in container.get("env", [])}


def settings(documents: list[Document], pod: Pod) -> ServeSettings:
    known = environment(documents, pod.server).items()
    given = {name: value for name, value in known if value is not None and name.startswith(PREFIX)}
    return ServeSettings(**{name.removeprefix(PREFIX).lower(): value for name, value in given.items()})


def restricted_pods(documents: list[Document]) -> list[str]:
    found = []
    for pod in pods(documents):
        whole = pod.spec.get("securityContext", {})
        found += [f"{pod.name} has {name}" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.spec.get(name)]
        for volume in pod.spec.get("volumes", []):
            found += [f"volume {volume['name']} is {kind}" for kind in volume if kind != "name" and kind not in VOLUMES]
        for container in pod.containers:
            name = container["name"]
            own = container.get("securityContext", {})
            context = whole | own
            if not context.get("runAsNonRoot") or context.get("runAsUser", 0) == 0:
                found.append(f"{name} may run as root")
            if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
                found.append(f"{name} has no seccomp profile")
            if own.get("allowPrivilegeEscalation", True) or own.get("privileged"):
                found.append(f"{name} may gain privileges")
            capabilities = own.get("capabilities", {})
            if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
                found.append(f"{name} has capabilities")
            if not own.get("readOnlyRootFilesystem"):
                found.append(f"{name} can write to its image")
    return found


def no_cluster_access(documents: list[Document]) -> list[str]:
    """No token of the cluster's API, and no variables from the names of other services."""
    found = []
    for pod in pods(documents):
        if pod.spec.get("automountServiceAccountToken", True):
            found.append(f"{pod.name} gets a service-account token")
        if pod.spec.get("enableServiceLinks", True):
            found.append(f"{pod.name} gets variables of services, and a service sharp-grpc would set SHARP_GRPC_PORT")
    return found


def resources_are_set(documents: list[Document]) -> list[str]:
    found = []
    for pod in pods(documents):
        for container in pod.containers:
            asked = container.get("resources", {})
            for part in ("requests", "limits"):
                found += [
                    f"{container['name']} has no {part} of {name}"
                    for name in ("cpu", "memory")
                    if name not in asked.get(part, {})
                ]
            for name in {*asked.get("requests", {}), *asked.get("limits", {})}:
                pair = [asked.get(part, {}).get(name) for part in ("requests", "limits")]
                if name.startswith("nvidia.com/") and pair[0] != pair[1]:
                    found.append(f"{container['name']} requests other GPUs than its limit: {name}")
    return found


def copies_fit_the_disk(documents: list[Document]) -> list[str]:
    """An emptyDir counts against the pod's limit of ephemeral storage; above it the pod is evicted."""
    found = []
    for pod in pods(documents):
        size = 0.0
        for volume in pod.spec.get("volumes", []):
            if "emptyDir" in volume:
                limit = (volume["emptyDir"] or {}).get("sizeLimit")
                if limit is None:
                    found.append(f"volume {volume['name']} has no size limit")
                size += quantity(limit or 0)
        disk = pod.server["resources"]["limits"].get("ephemeral-storage")
        if disk is not None and size > quantity(disk):
            found.append(f"{pod.name} would be evicted: its volumes hold more than its limit of ephemeral storage")
    return found


def probes_ask_the_server(documents: list[Document]) -> list[str]:
    found = []
    for pod in servers(documents):
        chosen = settings(documents, pod)
        ports = {port["containerPort"] for port in pod.server["ports"]}
        named = {port["name"]: port["containerPort"] for port in pod.server["ports"]}
        if not ports <= {chosen.grpc_port, chosen.http_port}:
            found.append(f"{pod.name} has the ports {sorted(ports)}, and the server does not listen on all of them")
        if chosen.host not in ("0.0.0.0", "::"):
            found.append(f"{pod.name} listens on {chosen.host}, where nobody can ask")
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = pod.server.get(kind, {})
            if "grpc" in probe:
                if probe["grpc"]["port"] != chosen.grpc_port:
                    found.append(f"{kind} asks another port than gRPC's")
                if chosen.tls_cert is not None:
                    found.append(f"{kind} speaks gRPC without TLS to a server that wants it")
            elif "httpGet" in probe:
                asked = probe["httpGet"]
                if named.get(asked["port"], asked["port"]) != chosen.http_port or asked["path"] not in HTTP_ROUTES:
                    found.append(
                        f"{kind} asks for {asked['path']} on {asked['port']}, which the server does not answer"
                    )
                if asked.get("scheme", "HTTP") != ("HTTP" if chosen.tls_cert is None else "HTTPS"):
                    found.append(f"{kind} asks over {asked.get('scheme', 'HTTP')}")
                if chosen.tls_client_ca is not None:
                    found.append(f"{kind} has no certificate to show")
            else:
                found.append(f"{pod.name} has no {kind}")
    return found


def rays_pods_have_probes(documents: list[Document]) -> list[str]:
    """KubeRay adds the probes that a container does not have, and those run wget, which the image does not hold."""
    return [
        f"{pod.name} has no {kind} of its own that needs no program"
        for pod in pods(documents)
        if pod.of_ray
        for container in pod.containers
        for kind in ("readinessProbe", "livenessProbe")
        if not {"httpGet", "grpc"} & container.get(kind, {}).keys()
    ]


def the_end_has_time(documents: list[Document]) -> list[str]:
    """The kubelet kills after the grace period, in which preStop, the drain and the last step must fit."""
    found = []
    for pod in servers(documents):
        command = pod.server.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if len(command) != 2 or command[0] != "sleep":
            found.append(f"{pod.name} does not wait before it ends, and requests still come")
            continue
        needed = float(command[1]) + settings(documents, pod).grace_seconds + END_SECONDS
        if pod.spec.get("terminationGracePeriodSeconds", 30) < needed:
            found.append(f"{pod.name} is killed before its requests had their time: it needs {needed:g} s")
    return found


def the_start_has_time(documents: list[Document]) -> list[str]:
    """A model takes minutes to load; meanwhile the pod is neither killed nor its update given up."""
    found = []
    for pod in servers(documents):
        probe = pod.server.get("startupProbe", {})
        allowed = probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10)
        if allowed < LOAD_SECONDS:
            found.append(f"{pod.name} has {allowed} s to load its model")
        for deployment in of_kind(documents, "Deployment"):
            if deployment["spec"].get("progressDeadlineSeconds", 600) <= allowed:
                found.append(f"an update of {pod.name} counts as failed while it may still load its model")
    return found


def settings_exist(documents: list[Document]) -> list[str]:
    """Variables, flags and values are those of the real command."""
    found = []
    flags = {flag for option in serve.params for flag in (*option.opts, *option.secondary_opts)}
    for pod in servers(documents):
        names = {name for name in environment(documents, pod.server) if name.startswith(PREFIX)}
        found += [f"{name} is no setting of sharp-serve" for name in sorted(names - KNOWN_VARIABLES)]
        given = [word.split("=")[0] for word in pod.server.get("args", []) if word.startswith("-")]
        found += [f"{flag} is no flag of sharp-serve" for flag in given if flag not in flags]
        try:
            settings(documents, pod)
        except ValidationError as error:
            found += [f"{problem['loc']}: {problem['msg']}" for problem in error.errors()]
    return found


def volumes_are_there(documents: list[Document]) -> list[str]:
    found = []
    for pod in pods(documents):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        mounts = [mount for container in pod.containers for mount in container.get("volumeMounts", [])]
        found += [
            f"{pod.name} mounts {mount['name']}, which is no volume" for mount in mounts if mount["name"] not in volumes
        ]
        found += [
            f"{pod.name} does not mount {name}" for name in volumes if name not in {one["name"] for one in mounts}
        ]
        for name, volume in volumes.items():
            if "secret" in volume and volume["secret"].get("defaultMode", 0o644) & 0o007:
                found.append(f"everybody can read the secret {name}")
        for mount in pod.server.get("volumeMounts", []):
            if "subPath" in mount:
                found.append(f"{mount['name']} is mounted by a subPath, where a changed secret does not arrive")
        paths = [mount["mountPath"] for mount in pod.server.get("volumeMounts", [])]
        chosen = settings(documents, pod)
        for file in (chosen.tls_cert, chosen.tls_key, chosen.tls_client_ca, chosen.token_file):
            if file is not None and not any(file.is_relative_to(path) for path in paths):
                found.append(f"{file} is in no volume")
        for variable in (one for container in pod.containers for one in container.get("env", [])):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                found.append(f"{variable['name']} is a secret in the environment")
    return found


def _selectors(document: Document) -> Iterator[dict[str, Any]]:
    kind, spec = document["kind"], document.get("spec", {})
    if kind == "Service":
        yield spec.get("selector", {})
    elif kind in ("PodDisruptionBudget", "Deployment", "PodMonitor", "InferencePool"):
        yield spec["selector"].get("matchLabels", {})
    elif kind == "NetworkPolicy":
        yield spec["podSelector"].get("matchLabels", {})
        for source in (one for rule in spec["ingress"] for one in rule["from"]):
            if source.get("podSelector"):
                yield source["podSelector"]["matchLabels"]
    for pod in pods([document]) if kind in ("Deployment", "RayService") else ():
        for constraint in pod.spec.get("topologySpreadConstraints", []):
            yield constraint["labelSelector"].get("matchLabels", {})


def selectors_find_the_pods(documents: list[Document]) -> list[str]:
    found = []
    labels = [pod.labels for pod in pods(documents)]
    for document in documents:
        for selector in _selectors(document):
            if not selector:
                found.append(f"{document['kind']} {document['metadata']['name']} selects every pod of the namespace")
            elif not any(selector.items() <= one.items() for one in labels):
                found.append(f"{document['kind']} {document['metadata']['name']} selects no pod")
    return found


def references_exist(documents: list[Document]) -> list[str]:
    found = []
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    ports = {port["name"]: port["containerPort"] for pod in pods(documents) for port in pod.server["ports"]}

    def expect(user: Document, kind: str, name: str) -> None:
        if (kind, name) not in names:
            found.append(f"{user['kind']} {user['metadata']['name']} names {kind} {name}, which is not here")

    for document in documents:
        kind, spec = document["kind"], document.get("spec", {})
        if kind == "Deployment":
            pod = spec["template"]["spec"]
            expect(document, "ServiceAccount", pod["serviceAccountName"])
            for container in (*pod.get("initContainers", []), *pod["containers"]):
                for source in container.get("envFrom", []):
                    expect(document, "ConfigMap", source["configMapRef"]["name"])
            for volume in pod.get("volumes", []):
                if "configMap" in volume:
                    expect(document, "ConfigMap", volume["configMap"]["name"])
        elif kind in SCALERS:
            expect(document, spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
        elif kind == "HTTPRoute":
            for rule in spec["rules"]:
                for backend in rule["backendRefs"]:
                    expect(document, backend["kind"], backend["name"])
        used = [port["targetPort"] for port in spec.get("ports", [])] if kind == "Service" else []
        used += [port["port"] for port in spec.get("podMetricsEndpoints", [])]
        used += [port["number"] for port in spec.get("targetPorts", [])]
        if kind == "NetworkPolicy":
            used += [port["port"] for rule in spec["ingress"] for port in rule.get("ports", [])]
        found += [
            f"{kind} {document['metadata']['name']} names the port {port}, which no server has"
            for port in used
            if port not in ports and port not in ports.values()
        ]
    return found


def one_owner_of_replicas(documents: list[Document]) -> list[str]:
    scalers = of_kind(documents, *SCALERS)
    targets = [scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers]
    found = [f"{name} has several autoscalers" for name in sorted(set(targets)) if targets.count(name) > 1]
    for deployment in of_kind(documents, "Deployment"):
        name = deployment["metadata"]["name"]
        if name in targets and "replicas" in deployment["spec"]:
            found.append(f"every apply would reset the replicas of {name}, which its autoscaler chose")
        if name not in targets and deployment["spec"].get("replicas", 1) < 2:
            found.append(f"{name} has one replica")
    return found


def busy_servers_are_kept(documents: list[Document]) -> list[str]:
    """KEDA counts running requests, too, and asks for more servers before all of them are full."""
    found = []
    for scaler in of_kind(documents, "ScaledObject"):
        asked = {one["metadata"]["query"]: one["metadata"]["threshold"] for one in scaler["spec"]["triggers"]}
        running = [float(threshold) for query, threshold in asked.items() if "sharp_requests_running" in query]
        if not running:
            found.append(f"{scaler['metadata']['name']} takes busy servers away when nothing waits")
        for pod in servers(documents):
            most = settings(documents, pod).max_sequences
            if any(threshold >= most for threshold in running):
                found.append(
                    f"{pod.name} runs at most {most} requests together, which the autoscaler does not call busy"
                )
    return found


def prometheus_can_read(documents: list[Document]) -> list[str]:
    """A PodMonitor asks in the server's own scheme, under the job that the alerts name, and is let in."""
    found = []
    for monitor in of_kind(documents, "PodMonitor"):
        for pod in pods(documents):
            named = pod.labels.get(monitor["spec"].get("jobLabel", "")) == JOB
            if not named and not pod.of_ray:
                found.append(f'the job would not be "{JOB}", and the alert SharpDown would never fire')
            if named and pod.of_ray:
                found.append(f'the job would be "{JOB}", and SharpDown would fire when Ray takes a replica away')
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                wanted = "http" if settings(documents, pod).tls_cert is None else "https"
                if endpoint.get("scheme", "http") != wanted:
                    found.append(f"Prometheus asks over {endpoint.get('scheme', 'http')}; the server answers {wanted}")
                if endpoint.get("path", "/metrics") not in HTTP_ROUTES:
                    found.append(f"Prometheus asks for {endpoint['path']}")
        for policy in of_kind(documents, "NetworkPolicy"):
            spaces = [
                source for rule in policy["spec"]["ingress"] for source in rule["from"] if "namespaceSelector" in source
            ]
            if not spaces:
                found.append("the network policy keeps Prometheus out")
    for scaler in of_kind(documents, "ScaledObject"):
        if not of_kind(documents, "PodMonitor"):
            found.append(f"{scaler['metadata']['name']} asks Prometheus, which does not read these servers")
    return found


def queries_name_the_namespace(documents: list[Document]) -> list[str]:
    found = []
    for scaler in of_kind(documents, "ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            named = re.findall(r'namespace="([^"]*)"', trigger["metadata"]["query"])
            if named != [scaler["metadata"].get("namespace")]:
                found.append(f"the query counts requests of the namespace {named}")
    return found


def images_are_pinned(documents: list[Document]) -> list[str]:
    found = []
    for pod in pods(documents):
        for container in pod.containers:
            _, _, tag = container["image"].rpartition("/")[2].partition(":")
            if (
                not re.fullmatch(rf"{re.escape(VERSION)}(-cpu|-cuda|-ray)?", tag)
                and "@sha256:" not in container["image"]
            ):
                found.append(f"{container['name']} runs {container['image']}, which is not of version {VERSION}")
        gpu = any(name.startswith("nvidia.com/") for name in pod.server["resources"]["limits"])
        if gpu != pod.server["image"].endswith("-cuda"):
            found.append(
                f"{pod.name} runs {shlex.quote(pod.server['image'])} " + ("with" if gpu else "without") + " a GPU"
            )
    return found


def gpus_are_used(documents: list[Document]) -> list[str]:
    """With another device than cuda a server may take a GPU and compute on processors."""
    found = []
    for pod in servers(documents):
        gpu = any(name.startswith("nvidia.com/") for name in pod.server["resources"]["limits"])
        device = settings(documents, pod).device
        if gpu and device != "cuda":
            found.append(f"{pod.name} has a GPU and SHARP_DEVICE={device}")
    return found


def workers_of_ray_are_kept(documents: list[Document]) -> list[str]:
    """Some of Ray's workers stay when nodes are drained.

    A RayCluster does not say how many pods it should have, so only a budget of minAvailable lets any of them go. The
    head is one pod, which no budget could let go.
    """
    found = []
    for pod in (one for one in pods(documents) if one.of_ray):
        budgets = [
            budget["spec"]
            for budget in of_kind(documents, "PodDisruptionBudget")
            if budget["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        ]
        if pod.name == HEAD and budgets:
            found.append("the budget includes the head, whose node could not be drained")
        if pod.name != HEAD and not budgets:
            found.append(f"all {pod.name} may be taken away together")
        if any(not isinstance(budget.get("minAvailable"), int) for budget in budgets):
            found.append(f"the budget of {pod.name} lets no node be drained: it needs a number in minAvailable")
    return found


def interruptions_are_limited(documents: list[Document]) -> list[str]:
    """Every Deployment has a disruption budget that can be met, a network policy, and is spread over nodes."""
    found = []
    for deployment in of_kind(documents, "Deployment"):
        name = deployment["metadata"]["name"]
        for kind in ("PodDisruptionBudget", "NetworkPolicy"):
            if not of_kind(documents, kind):
                found.append(f"{name} has no {kind}")
        for budget in of_kind(documents, "PodDisruptionBudget"):
            if budget["spec"].get("maxUnavailable") in (0, "0%", None):
                found.append(f"the budget of {name} lets no node be drained")
        keys = {
            one["topologyKey"] for one in deployment["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
        }
        if "kubernetes.io/hostname" not in keys:
            found.append(f"all servers of {name} may be on one node")
        if deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] != 0:
            found.append(f"an update of {name} takes servers away before there are new ones")
        kinds = {one for policy in of_kind(documents, "NetworkPolicy") for one in policy["spec"]["policyTypes"]}
        if kinds != {"Ingress", "Egress"}:
            found.append(f"the network policy of {name} is open")
    return found


POLICIES = {
    policy.__name__: policy
    for policy in (
        restricted_pods,
        no_cluster_access,
        resources_are_set,
        copies_fit_the_disk,
        probes_ask_the_server,
        rays_pods_have_probes,
        the_start_has_time,
        the_end_has_time,
        settings_exist,
        volumes_are_there,
        selectors_find_the_pods,
        references_exist,
        one_owner_of_replicas,
        busy_servers_are_kept,
        prometheus_can_read,
        queries_name_the_namespace,
        images_are_pinned,
        gpus_are_used,
        workers_of_ray_are_kept,
        interruptions_are_limited,
    )
}
