"""Policies for pods that run sharp-serve: settings, probes, and the time to start and to end."""

from pydantic import ValidationError

from sharp.serving.cli import serve
from sharp.serving.server.settings_sources import KNOWN_VARIABLES, PREFIX
from tests.full.deploy.policies.documents import (
    HTTP_ROUTES,
    environment,
    of_kind,
    server_deployments,
    servers,
    settings,
)
from tests.full.deploy.rendering import Document

# The end of a server takes this much longer than its drain, for the last step and the last messages.
END_SECONDS = 10
LOAD_SECONDS = 600


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
                    found.append(f"{kind} asks for {asked['path']} on {asked['port']}, which the server does not serve")
                if asked.get("scheme", "HTTP") != ("HTTP" if chosen.tls_cert is None else "HTTPS"):
                    found.append(f"{kind} asks over {asked.get('scheme', 'HTTP')}")
                if chosen.tls_client_ca is not None:
                    found.append(f"{kind} has no certificate to show")
            else:
                found.append(f"{pod.name} has no {kind}")
    return found


def the_end_has_time(documents: list[Document]) -> list[str]:
    """Find pods whose grace period is too short for preStop, the drain and the last step.

    The kubelet kills a pod after the grace period.
    """
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
    """Find pods that are killed, or whose update is given up, while their model loads, which may take minutes."""
    found = []
    for pod in servers(documents):
        probe = pod.server.get("startupProbe", {})
        allowed = probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10)
        if allowed < LOAD_SECONDS:
            found.append(f"{pod.name} has {allowed} s to load its model")
        for deployment in server_deployments(documents):
            if deployment["spec"].get("progressDeadlineSeconds", 600) <= allowed:
                found.append(f"an update of {pod.name} counts as failed while it may still load its model")
    return found


def settings_exist(documents: list[Document]) -> list[str]:
    """Find variables, flags and values that the real command does not have."""
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


def gpus_are_used(documents: list[Document]) -> list[str]:
    """Find pods with a GPU whose setting `device` is not cuda, so that they may compute on processors."""
    found = []
    for pod in servers(documents):
        gpu = any(name.startswith("nvidia.com/") for name in pod.server["resources"]["limits"])
        device = settings(documents, pod).device
        if gpu and device != "cuda":
            found.append(f"{pod.name} has a GPU and SHARP_DEVICE={device}")
    return found


def tokens_are_required(documents: list[Document]) -> list[str]:
    """Find Deployments whose servers need no token.

    KServe's pods are behind its own gateway, and `policies.ray` checks Ray's pods.
    """
    deployed = {deployment["metadata"]["name"] for deployment in server_deployments(documents)}
    return [
        f"{pod.name} serves whoever reaches it"
        for pod in servers(documents)
        if pod.name in deployed and settings(documents, pod).token_file is None
    ]


def only_named_clients_are_admitted(documents: list[Document]) -> list[str]:
    """Find network policies with an empty selector, which admits every pod or every namespace."""
    found = []
    for policy in of_kind(documents, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            sources = rule.get("from", [])
            if not sources or not all(source and all(source.values()) for source in sources):
                found.append(f"{policy['metadata']['name']} admits whoever is in the cluster, or in the namespace")
    return found
