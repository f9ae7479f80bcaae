"""Policies for the number of servers: autoscalers, and everything that may take servers away."""

import re

from tests.full.deploy.policies.documents import SCALERS, of_kind, server_deployments, servers, settings
from tests.full.deploy.rendering import Document


def one_owner_of_replicas(documents: list[Document]) -> list[str]:
    scalers = of_kind(documents, *SCALERS)
    targets = [scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers]
    found = [f"{name} has several autoscalers" for name in sorted(set(targets)) if targets.count(name) > 1]
    for deployment in server_deployments(documents):
        name = deployment["metadata"]["name"]
        if name in targets and "replicas" in deployment["spec"]:
            found.append(f"every apply would reset the replicas of {name}, which its autoscaler chose")
        if name not in targets and deployment["spec"].get("replicas", 1) < 2:
            found.append(f"{name} has one replica")
    return found


def busy_servers_are_kept(documents: list[Document]) -> list[str]:
    """Find KEDA scalers that ignore running requests, or that scale up only after all servers are full."""
    found = []
    for scaler in of_kind(documents, "ScaledObject"):
        asked = {
            trigger["metadata"]["query"]: trigger["metadata"]["threshold"] for trigger in scaler["spec"]["triggers"]
        }
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


def queries_name_the_namespace(documents: list[Document]) -> list[str]:
    found = []
    for scaler in of_kind(documents, "ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            named = re.findall(r'namespace="([^"]*)"', trigger["metadata"]["query"])
            if named != [scaler["metadata"].get("namespace")]:
                found.append(f"the query counts requests of the namespace {named}")
    return found


def interruptions_are_limited(documents: list[Document]) -> list[str]:
    """Find Deployments without a disruption budget that can be met, a network policy, or a spread over nodes."""
    found = []
    for deployment in server_deployments(documents):
        name = deployment["metadata"]["name"]
        for kind in ("PodDisruptionBudget", "NetworkPolicy"):
            if not of_kind(documents, kind):
                found.append(f"{name} has no {kind}")
        for budget in of_kind(documents, "PodDisruptionBudget"):
            if budget["spec"].get("maxUnavailable") in (0, "0%", None):
                found.append(f"the budget of {name} lets no node be drained")
        keys = {
            constraint["topologyKey"]
            for constraint in deployment["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
        }
        if "kubernetes.io/hostname" not in keys:
            found.append(f"all servers of {name} may be on one node")
        if deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] != 0:
            found.append(f"an update of {name} takes servers away before there are new ones")
        kinds = {
            policy_type
            for policy in of_kind(documents, "NetworkPolicy")
            for policy_type in policy["spec"]["policyTypes"]
        }
        if kinds != {"Ingress", "Egress"}:
            found.append(f"the network policy of {name} is open")
    return found
