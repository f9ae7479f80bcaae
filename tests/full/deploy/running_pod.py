"""`RunningPod`: a pod of a rendered Deployment in podman and runc, as a kubelet would run it.

Security context, limits, variables, volumes, probes, preStop and grace are read from the manifest.
"""

import http.client
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.full.deploy.built_images import STORE, run
from tests.full.deploy.policies.documents import environment, pods
from tests.full.deploy.policies.pods import quantity
from tests.full.deploy.rendering import Document

PODMAN = ("podman", *STORE, "--cgroup-manager", "cgroupfs", "--runtime", "runc")
NUMBERS = itertools.count(1)
# Limits for the container, because a user whose own limits are higher may not raise them for the container.
RLIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")


class RunningPod:
    """A pod with its own address, which this machine can reach, and whose volumes are folders of `volumes`."""

    def __init__(
        self, documents: list[Document], image: str, volumes: dict[str, Path], container: dict[str, Any] | None = None
    ) -> None:
        (self.pod,) = pods(documents)
        self.spec = self.pod.spec
        self.container = container or self.pod.server
        self.variables = environment(documents, self.container) | self._fields()
        self.ports = {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}
        self.image = image
        self._volumes = volumes
        number = next(NUMBERS)
        self.name = f"sharp-{os.getpid()}-{number}"
        self._subnet = f"10.232.{os.getpid() % 200}.{4 * number}"
        self.address = f"10.232.{os.getpid() % 200}.{4 * number + 2}"

    def _fields(self) -> dict[str, str]:
        """Return the variables that a kubelet reads from the pod's labels; a label that is missing is an empty text."""
        found = {}
        for variable in self.container.get("env", []):
            if "valueFrom" in variable:
                (path,) = variable["valueFrom"]["fieldRef"].values()
                (label,) = re.fullmatch(r"metadata\.labels\['(.*)'\]", path).groups()
                found[variable["name"]] = self.pod.labels.get(label, "")
        return found

    @contextmanager
    def network(self) -> Iterator[None]:
        """Create a network namespace that is linked to this machine only, for the time of the block."""
        near, host = f"sh{os.getpid() % 100000}-{self.address.rpartition('.')[2]}", self.address.rpartition(".")[0]
        first = int(self.address.rpartition(".")[2]) - 1
        run("ip", "netns", "add", self.name)
        try:
            run("ip", "link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            run("ip", "address", "add", f"{host}.{first}/30", "dev", near)
            run("ip", "link", "set", near, "up")
            run("ip", "-n", self.name, "address", "add", f"{self.address}/30", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", self.name, "link", "set", device, "up")
            yield
        finally:
            run("ip", "netns", "delete", self.name)

    def options(self) -> list[str]:
        """Return the options of `podman run` for the pod's manifest.

        Raises:
            KeyError: The manifest has a field that this class does not carry out.
        """
        context = self.spec["securityContext"] | self.container["securityContext"]
        assert set(context) <= KNOWN_CONTEXT, set(context) - KNOWN_CONTEXT
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}  # podman's default
        limits = self.container["resources"]["limits"]
        options = [
            *("--user", f"{context['runAsUser']}:{context['runAsGroup']}", "--group-add", str(context["fsGroup"])),
            *("--memory", str(int(quantity(limits["memory"]))), "--cpus", str(quantity(limits["cpu"]))),
            *(word for name in context["capabilities"]["drop"] for word in ("--cap-drop", name)),
            *(["--read-only", "--read-only-tmpfs=false"] if context["readOnlyRootFilesystem"] else []),
            *([] if context["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges"]),
            *(word for name, value in self.variables.items() for word in ("--env", f"{name}={value}")),
        ]
        of_volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            name, at = mount["name"], mount["mountPath"]
            mode = "ro" if mount.get("readOnly") else "rw"
            if name in self._volumes:
                options += ["--volume", f"{self._volumes[name]}:{at}:{mode}"]
            else:
                size = int(quantity(of_volumes[name]["emptyDir"]["sizeLimit"]))
                options += ["--tmpfs", f"{at}:{mode},size={size},mode=1777"]
        return options

    def start(self) -> None:
        """Start the container in the network that already exists."""
        command = [*self.container.get("command", []), *self.container.get("args", [])]
        entry = []
        if "command" in self.container:
            entry, command = ["--entrypoint", json.dumps(self.container["command"])], self.container.get("args", [])
        network = ["--network", f"ns:/run/netns/{self.name}"]
        options = [*RLIMITS, *self.options(), *network, *entry, "--name", self.name, "--detach"]
        run(*PODMAN, "run", *options, self.image, *command)

    def inspect(self) -> dict[str, Any]:
        """Return podman's description of the container."""
        (found,) = json.loads(run(*PODMAN, "inspect", self.name))
        return dict(found)

    def probe(self, kind: str) -> bool:
        """Whether a probe of the manifest succeeds now."""
        probe = self.container[f"{kind}Probe"]
        asked = probe["httpGet"]
        connection = http.client.HTTPConnection(self.address, self.ports[asked["port"]], probe["timeoutSeconds"])
        try:
            connection.request("GET", asked["path"])
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait_until_started(self) -> float:
        """Run the startup probe as often as the manifest says, and return the seconds until it succeeded."""
        probe = self.container["startupProbe"]
        began = time.monotonic()
        for _ in range(probe["failureThreshold"]):
            if self.probe("startup"):
                return time.monotonic() - began
            assert self.inspect()["State"]["Running"], self.log()
            time.sleep(probe["periodSeconds"])
        raise AssertionError(f"the startup probe failed for too long\n{self.log()}")

    def execute(self, *command: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        command = (*PODMAN, "exec", self.name, *command)
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)

    def terminate(self) -> tuple[int, float]:
        """End the pod as a kubelet does: preStop, SIGTERM, and SIGKILL after the grace period.

        The exit code and the seconds that the end took are returned.
        """
        grace = self.spec["terminationGracePeriodSeconds"]
        began = time.monotonic()
        hook = self.container["lifecycle"]["preStop"]["exec"]["command"]
        result = self.execute(*hook, seconds=grace)
        assert result.returncode == 0, result.stderr
        left = round(grace - (time.monotonic() - began))
        run(*PODMAN, "stop", "--time", str(left), self.name, seconds=grace + 60)
        return int(run(*PODMAN, "wait", self.name)), time.monotonic() - began

    def changes(self) -> list[str]:
        """Return the files that the container wrote into its image."""
        return [line for line in run(*PODMAN, "diff", self.name).splitlines() if not MOUNT_POINTS.fullmatch(line)]

    def log(self) -> str:
        """Return everything that the container wrote to stdout and stderr."""
        result = subprocess.run((*PODMAN, "logs", self.name), capture_output=True, text=True, timeout=60, check=False)
        return result.stdout + result.stderr

    def remove(self) -> None:
        """Remove the container, whether it runs or not."""
        with suppress(AssertionError):
            run(*PODMAN, "rm", "--force", "--time", "0", self.name)


KNOWN_CONTEXT = {
    *("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile"),
    *("allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"),
}
# Folders that podman makes for mounts.
MOUNT_POINTS = re.compile(r"[AC] /(model|tmp|copy|fetch|etc|etc/sharp|etc/sharp/\w+|run|run/.*|dev|proc|sys|etc/mtab)?")


@contextmanager
def running_pod(
    documents: list[Document], image: str, volumes: dict[str, Path], container: dict[str, Any] | None = None
) -> Iterator[RunningPod]:
    """Start a pod, yield it, and remove it."""
    pod = RunningPod(documents, image, volumes, container)
    with pod.network():
        try:
            pod.start()
            yield pod
        finally:
            pod.remove()


def secret(folder: Path, group: int, **files: str) -> Path:
    """Write a secret as a kubelet mounts it: files of the pod's group, which other users cannot read."""
    folder.mkdir()
    for name, content in files.items():
        path = folder / name
        path.write_text(content)
        os.chown(path, 0, group)
        path.chmod(0o440)
    return folder


def claim(folder: Path, source: Path) -> Path:
    """Make a volume claim with a copy of a folder, which every user can read."""
    shutil.copytree(source, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder
