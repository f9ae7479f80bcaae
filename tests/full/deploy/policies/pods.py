"""Policies for every pod: its rights, its resources, its mounts and its image."""

import re
import shlex
import tomllib
from typing import Any

from tests.full.deploy.policies.documents import pods, settings
from tests.full.deploy.rendering import ROOT, Document

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# The kinds of volumes that the pod security standard "restricted" allows, image volumes since Kubernetes 1.33.
VOLUMES = {
    *(
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ),
}
# The picker is of another project, which releases it under versions of its own.
PICKERS_VERSION = r"v\d+\.\d+\.\d+"
UNITS = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 1e3, "M": 1e6, "G": 1e9}


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
    """Find pods that get a token of the cluster's API, or variables from the names of other services.

    `policies.picker` limits what the endpoint picker may do with its token.
    """
    found = []
    for pod in pods(documents):
        if not pod.is_picker and pod.spec.get("automountServiceAccountToken", True):
            found.append(f"{pod.name} gets a service-account token")
        if pod.spec.get("enableServiceLinks", True):
            found.append(f"{pod.name} gets variables of services, and a service sharp-grpc would set SHARP_GRPC_PORT")
    return found


def quantity(value: Any) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(value)).groups()
    return float(number) * UNITS[unit]


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
    """Find emptyDirs that exceed the pod's limit of ephemeral storage, above which the pod is evicted."""
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


def volumes_are_there(documents: list[Document]) -> list[str]:
    found = []
    for pod in pods(documents):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        mounts = [mount for container in pod.containers for mount in container.get("volumeMounts", [])]
        found += [
            f"{pod.name} mounts {mount['name']}, which is no volume" for mount in mounts if mount["name"] not in volumes
        ]
        found += [
            f"{pod.name} does not mount {name}" for name in volumes if name not in {mount["name"] for mount in mounts}
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
        for variable in (entry for container in pod.containers for entry in container.get("env", [])):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                found.append(f"{variable['name']} is a secret in the environment")
    return found


def images_are_pinned(documents: list[Document]) -> list[str]:
    found = []
    for pod in pods(documents):
        used = {container["name"]: container["image"] for container in pod.containers}
        used |= {
            volume["name"]: volume["image"]["reference"] for volume in pod.spec.get("volumes", []) if "image" in volume
        }
        version = PICKERS_VERSION if pod.is_picker else rf"{re.escape(VERSION)}(-cpu|-cuda|-ray)?"
        for name, image in used.items():
            _, _, tag = image.rpartition("/")[2].partition(":")
            if not re.fullmatch(version, tag) and "@sha256:" not in image:
                found.append(f"{name} runs {image}, which is not of version {VERSION}")
        gpu = any(name.startswith("nvidia.com/") for name in pod.server["resources"]["limits"])
        if gpu != pod.server["image"].endswith("-cuda"):
            found.append(
                f"{pod.name} runs {shlex.quote(pod.server['image'])} " + ("with" if gpu else "without") + " a GPU"
            )
    return found
