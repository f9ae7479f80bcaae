"""The image of Ray: its steps, run without Docker, and the page's commands for a cluster, run in the result."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.full.deploy.dockerfile import environment, lineage, read_stages
from tests.full.deploy.installed_image import installed
from tests.missing_tools import missing
from tests.serving.conftest import write_folder

ROOT = Path(__file__).parents[3]
STAGES = read_stages((ROOT / "deploy" / "docker" / "Dockerfile").read_text())
PAGE = (ROOT / "docs" / "deploy.md").read_text().partition("## 8.")[2]
(COMMANDS, *_) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
CONFIGURATION = "deploy/ray/serve.yaml"
MODEL = "/models/text-ssa-ssa"
FORBIDDEN = ("torch", "transformers", "onnx", "onnxscript", "matplotlib", "pip", "grpc_tools")

# A container as far as this machine can make one: everything but a new /tmp is read-only, there is no network, no
# process outlives the container, and the user has no capabilities, name or home. The user is root where only root may
# start this Python.
UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
CONTAINER = """
mount --make-rprivate /
mount -t tmpfs tmpfs /tmp
mount -o remount,bind,ro /
ip link set lo up
without="setpriv --no-new-privs --inh-caps=-all --bounding-set=-all"
user="--reuid=10001 --regid=10001 --clear-groups"
$without $user sh -c '"$0" -c ""' "$(type -P python)" || user=
exec $without $user "$@"
"""


@pytest.fixture(scope="module")
def image():
    """Yield the content of the image, with the model and the configuration that the page's commands need."""
    with installed(STAGES, "install-ray") as folder:
        write_folder(folder / "model", hashing=0)
        (folder / CONFIGURATION).parent.mkdir(parents=True)
        text = (ROOT / CONFIGURATION).read_text()
        (folder / CONFIGURATION).write_text(text.replace(MODEL, str(folder / "model")))
        yield folder


def variables(image):
    """Return the image's environment variables with the home that the overlay gives its pods.

    No variable of this process is among them.
    """
    known = environment(lineage(STAGES, "ray"))
    path = known["PATH"].replace("/opt/sharp", str(image / "sharp")).replace("$PATH", os.defpath)
    return known | {"PATH": f"{path}:/usr/sbin:/sbin", "HOME": "/tmp"}


def test_only_what_serving_needs_is_there(image):
    code = f"from importlib.util import find_spec; print([name for name in {FORBIDDEN} if find_spec(name)])"
    result = subprocess.run(
        ["python", "-c", code], env=variables(image), cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def test_a_cluster_starts_and_serves_on_a_read_only_disk(image):
    if os.geteuid() != 0:
        missing("mount and network namespaces need root")
    assert MODEL in (ROOT / CONFIGURATION).read_text()
    # This is one machine, so its head holds the replica, as the page says, and no other node joins.
    lines = [line.replace(" --num-cpus 0", "") for line in COMMANDS.splitlines() if " --address " not in line]
    wait = "until sharp health; do sleep 0.2; done"
    script = "\n".join([*lines[:-1], wait, lines[-1].replace("The package", "a") + " --temperature 0"])
    assert [line.split()[0] for line in lines] == ["export"] * 3 + ["ray", "ray", "serve", "sharp"]
    result = subprocess.run(
        [*UNSHARE, "bash", "-ec", CONTAINER, "bash", "bash", "-ec", script],
        env=variables(image),
        cwd=image,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "bcdefghijklmnopqrstuvwxyz" in result.stdout, result.stdout + result.stderr
