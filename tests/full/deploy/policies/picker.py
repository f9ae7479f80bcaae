"""Policies for the endpoint picker of the Gateway API, the only pod with a token of the cluster's API."""

from typing import Any

from tests.full.deploy.policies.documents import Pod, of_kind, pods
from tests.full.deploy.rendering import Document

VERBS = {"get", "list", "watch"}
READ = {("", "pods"), ("inference.networking.k8s.io", "inferencepools")}


def _rules(documents: list[Document], account: str) -> list[dict[str, Any]]:
    """Return the rules of the Roles that a service account is bound to."""
    bound = [
        binding["roleRef"]["name"]
        for binding in of_kind(documents, "RoleBinding")
        if (binding["roleRef"]["apiGroup"], binding["roleRef"]["kind"]) == ("rbac.authorization.k8s.io", "Role")
        and any(subject["kind"] == "ServiceAccount" and subject["name"] == account for subject in binding["subjects"])
    ]
    roles = (role for role in of_kind(documents, "Role") if role["metadata"]["name"] in bound)
    return [rule for role in roles for rule in role["rules"]]


def pickers_only_read(documents: list[Document]) -> list[str]:
    """Find pickers that cannot read the pool and its pods, and service accounts that may do anything else."""
    found = [
        f"{document['metadata']['name']} gives rights in the whole cluster"
        for document in of_kind(documents, "ClusterRole", "ClusterRoleBinding")
    ]
    for role in of_kind(documents, "Role"):
        for rule in role["rules"]:
            if not set(rule["verbs"]) <= VERBS:
                found.append(f"{role['metadata']['name']} may do more than read: {', '.join(rule['verbs'])}")
            if {"*", "secrets"} & {*rule["resources"], *rule["apiGroups"]}:
                found.append(f"{role['metadata']['name']} may read secrets")
    for pod in (candidate for candidate in pods(documents) if candidate.is_picker):
        allowed = {
            (group, resource)
            for rule in _rules(documents, pod.spec["serviceAccountName"])
            if set(rule["verbs"]) == VERBS
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        }
        found += [f"{pod.name} may not watch {resource}" for _, resource in sorted(READ - allowed)]
        if not pod.spec.get("automountServiceAccountToken", True):
            found.append(f"{pod.name} has no token, and cannot ask the cluster's API")
    return found


def pools_have_a_picker(documents: list[Document]) -> list[str]:
    """Find pools whose picker is missing, watches another pool, has no configuration, or cannot reach the servers."""
    found = []
    for pool in of_kind(documents, "InferencePool"):
        name, reference = pool["metadata"]["name"], pool["spec"]["endpointPickerRef"]
        services = [
            service for service in of_kind(documents, "Service") if service["metadata"]["name"] == reference["name"]
        ]
        if not services:
            found.append(f"the pool {name} names the Service {reference['name']}, which is not here")
            continue
        (service,) = services
        targets = {port["port"]: port["targetPort"] for port in service["spec"]["ports"]}
        chosen = [
            pod
            for pod in pods(documents)
            if pod.is_picker and service["spec"]["selector"].items() <= pod.labels.items()
        ]
        if len(chosen) != 1:
            found.append(f"the Service {reference['name']} selects {len(chosen)} pickers")
            continue
        (pod,) = chosen
        ports = {port["name"]: port["containerPort"] for port in pod.server["ports"]}
        if targets.get(reference["port"]["number"]) not in ports:
            found.append(
                f"the pool {name} names the port {reference['port']['number']}, which the picker does not have"
            )
        if _option(pod, "--pool-name") != name:
            found.append(f"{pod.name} watches the pool {_option(pod, '--pool-name')}, not {name}")
        found += _configuration_problems(documents, pod) + _reach_problems(documents, pod, pool)
    return found


def _option(pod: Pod, name: str) -> str:
    """Return the value of a flag in `pod`'s arguments, as --name=value or as two arguments, or ""."""
    words = [part for word in pod.server["args"] for part in word.split("=", 1)]
    return words[words.index(name) + 1] if name in words else ""


def _configuration_problems(documents: list[Document], pod: Pod) -> list[str]:
    folder, _, file = _option(pod, "--config-file").rpartition("/")
    mounted = {mount["mountPath"]: mount["name"] for mount in pod.server["volumeMounts"]}
    maps = {volume["name"]: volume["configMap"]["name"] for volume in pod.spec["volumes"] if "configMap" in volume}
    files = {found["metadata"]["name"]: found["data"] for found in of_kind(documents, "ConfigMap")}
    if file in files.get(maps.get(mounted.get(folder, ""), ""), {}):
        return []
    return [f"{pod.name} reads {folder}/{file}, which is in no ConfigMap"]


def _reach_problems(documents: list[Document], pod: Pod, pool: Document) -> list[str]:
    """Return what keeps the picker from the metrics of the servers: their network policy, or the picker's own."""
    found = []
    (port,) = (target["number"] for target in pool["spec"]["targetPorts"])
    own = [
        policy
        for policy in of_kind(documents, "NetworkPolicy")
        if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= pod.labels.items()
    ]
    if not own:
        found.append(f"{pod.name} has no NetworkPolicy, and asks no token for its metrics")
    for policy in own:
        ways = [
            rule
            for rule in policy["spec"]["egress"]
            if {"port": port} in rule["ports"]
            and {"podSelector": {"matchLabels": pool["spec"]["selector"]["matchLabels"]}} in rule.get("to", [])
        ]
        if not ways:
            found.append(f"{pod.name} cannot reach the servers of its pool")
    if pod.labels.get("sharp-client") != "true":
        found.append(f"the servers' network policy keeps {pod.name} out")
    return found
