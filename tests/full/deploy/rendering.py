"""Render manifests with `kubectl kustomize`."""

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.missing_tools import missing

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent for path in (KUBERNETES / "overlays").glob("*/kustomization.yaml"))

Document = dict[str, Any]

HARDWARE = [["cpu"], ["nvidia-gpu"], ["nvidia-gpu", "nvidia-mig"]]
MODELS = [["model-from-pvc"], ["model-from-image"], ["model-from-url"]]
SECURITY: list[list[str]] = [[], ["auth", "tls"]]
OPERATION = [
    [],
    ["monitoring"],
    ["autoscale-hpa"],
    ["autoscale-hpa", "monitoring"],
    ["monitoring", "autoscale-keda"],
]
# auth and tls together meet every combination. Each of them alone meets every mode of operation.
COMBINATIONS = [
    [*hardware, *model, *operation, *security]
    for hardware, model, operation, security in itertools.product(HARDWARE, MODELS, OPERATION, SECURITY)
]
# model-from-hub changes the same parts of the pod and of the network policy as model-from-url, and
# model-from-image-volume the same parts as model-from-pvc.
COMBINATIONS += [
    [*hardware, model, *security]
    for hardware in HARDWARE
    for model in ("model-from-hub", "model-from-image-volume")
    for security in SECURITY
]
# Gateways speak plain HTTP to the pool.
COMBINATIONS += [["cpu", "model-from-pvc", *parts, "inference-pool"] for parts in OPERATION]
COMBINATIONS += [["cpu", "model-from-pvc", *parts, alone] for parts in OPERATION for alone in ("auth", "tls")]


def kubectl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run kubectl, and skip or fail the test if kubectl is missing."""
    found = shutil.which("kubectl")
    if found is None:
        missing("kubectl is not there; get it (1.27 or newer, Debian 12's is older) as Kubernetes' documentation says")
    return subprocess.run([found, *arguments], capture_output=True, text=True, timeout=300, check=False)


def render(folder: Path) -> list[Document]:
    """Return the documents of a kustomization."""
    result = kubectl("kustomize", folder)
    assert result.returncode == 0, result.stderr
    return documents(result.stdout)


def documents(text: str) -> list[Document]:
    """Return the documents of a YAML stream.

    libyaml, if installed, reads the dashboards of all combinations in seconds.
    """
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def write_kustomization(folder: Path, components: list[str], **fields: Any) -> Path:
    """Write a kustomization of the base with components into `folder`, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    here = os.path.relpath(KUBERNETES, folder)
    content = {
        "resources": [f"{here}/base"],
        "components": [f"{here}/components/{name}" for name in components],
        **fields,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def render_combinations(folder: Path) -> dict[str, list[Document]]:
    """Return the documents of each of COMBINATIONS, by its components' names.

    One call of kubectl renders all, each in a namespace of its own.
    """
    names = {f"combination-{number}": "+".join(parts) for number, parts in enumerate(COMBINATIONS)}
    for namespace, parts in zip(names, COMBINATIONS, strict=True):
        write_kustomization(folder / namespace, parts, namespace=namespace)
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({"resources": list(names)}))
    found: dict[str, list[Document]] = {name: [] for name in names.values()}
    for document in render(folder):
        found[names[document["metadata"]["namespace"]]].append(document)
    return found


def without_hash(name: str) -> str:
    """Return the name of a ConfigMap without the hash of its content."""
    return re.sub(r"-[a-z0-9]{10}$", "", name)
