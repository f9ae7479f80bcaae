"""Policies for references between documents: selectors find pods, and named objects exist."""

from collections.abc import Iterator
from typing import Any

from tests.full.deploy.policies.documents import SCALERS, pods
from tests.full.deploy.rendering import Document


def _selectors(document: Document) -> Iterator[dict[str, Any]]:
    kind, spec = document["kind"], document.get("spec", {})
    if kind == "Service":
        yield spec.get("selector", {})
    elif kind in ("PodDisruptionBudget", "Deployment", "PodMonitor", "InferencePool"):
        yield spec["selector"].get("matchLabels", {})
    elif kind == "NetworkPolicy":
        yield spec["podSelector"].get("matchLabels", {})
        for source in (peer for rule in spec["ingress"] for peer in rule["from"]):
            if "matchLabels" in source.get("podSelector", {}):  # clients are other pods, selected by an expression
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
            elif not any(selector.items() <= pod_labels.items() for pod_labels in labels):
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
