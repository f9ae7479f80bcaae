"""Images of `deploy/docker`, built by buildah without a daemon or a registry, in `build/images`."""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from tests.full.deploy.rendering import ROOT
from tests.missing_tools import missing

FOLDER = ROOT / "build" / "images"
REQUESTED = ROOT / "build" / "deploy-tools"  # written by `make deploy-tools`
DOCKER = ROOT / "deploy" / "docker"
BASE = "localhost/python:3.11-slim-bookworm"
BUSYBOX = "localhost/busybox:1.37"
PROGRAMS = ("buildah", "debootstrap", "podman", "runc", "ip")
REGISTRY = shutil.which("docker-registry") or ROOT / "build" / "registry" / "usr" / "bin" / "docker-registry"
# A folder or page where pip finds a PyTorch for CPUs.
LINKS = os.environ.get("PIP_FIND_LINKS", "")
# A build compiles the kernels, which takes minutes on an idle machine.
BUILD_SECONDS = 3600
STORE = ("--root", str(FOLDER / "store"), "--runroot", str(FOLDER / "run"))
# As in python:3.11-slim-bookworm, there is no sources.list and no list of packages.
SOURCES = """Types: deb
URIs: {mirror}
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


def check_tools(*programs: str | Path) -> None:
    """Skip the test, in CI too, unless `make deploy-tools` was run in this checkout, because a build takes minutes."""
    if not REQUESTED.exists():
        pytest.skip("images are built after make deploy-tools")
    places = f"{os.environ['PATH']}:/usr/sbin"
    absent = [Path(name).name for name in programs if shutil.which(name, path=places) is None]
    if absent:
        missing(f"not there: {', '.join(absent)}; get them with: make deploy-tools")
    if os.geteuid() != 0:
        missing("buildah --isolation chroot and podman with runc need root here")


def run(*command: str | Path, seconds: float = 120) -> str:
    """Run a command that must succeed, and return its output."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def buildah(*arguments: str | Path, seconds: float = 300) -> str:
    """Run buildah in the project's own store, and return its output."""
    return run("buildah", *STORE, *arguments, seconds=seconds)


@contextmanager
def store() -> Iterator[None]:
    """Skip the test without the tools, and leave no mount and no working container when the last user is done.

    A build that is killed leaves the containers of its steps, each with a mounted layer. Several processes may use the
    store at the same time.
    """
    check_tools(*PROGRAMS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process cleans up
                return
            buildah("rm", "--all")
            # The driver's own mount holds the layers' mounts, so it is the last.
            for mount in sorted(mounts(), reverse=True):
                run("umount", mount)


def mounts() -> list[str]:
    """Return the mount points in the store."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line.split()[1] for line in lines if line.split()[1].startswith(f"{FOLDER}/")]


def digest(image: str) -> str:
    """Return the digest of an image in the store, or "" if the store lacks the image."""
    images = json.loads(buildah("images", "--json") or "[]") or []
    return next((entry["digest"] for entry in images if image in (entry["names"] or ())), "")


def mirror() -> str:
    """Return the address of this machine's Debian mirror."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"]
    known = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return known[0].rstrip("/") if known else "http://deb.debian.org/debian"


def base_image() -> str:
    """Build a stand-in for python:3.11-slim-bookworm, whose registry may be out of reach, and return its digest.

    The stand-in is Debian 12, whose Python is also 3.11.
    """
    if found := digest(BASE):
        return found
    root, address = FOLDER / "root", mirror()
    shutil.rmtree(root, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    packages = "python3,python3-venv,python3-pip,ca-certificates"
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root, address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if result.returncode != 0:
        missing(f"debootstrap cannot read {address}: {result.stdout.strip().splitlines()[-1:]}")
    (root / "etc" / "apt" / "sources.list").unlink(missing_ok=True)
    (root / "etc" / "apt" / "sources.list.d" / "debian.sources").write_text(SOURCES.format(mirror=address))
    for folder in (root / "var" / "lib" / "apt" / "lists", root / "var" / "cache" / "apt" / "archives"):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "partial").mkdir(parents=True)
    _commit(root, BASE)
    shutil.rmtree(root)
    return digest(BASE)


def busybox_image() -> str:
    """Build a stand-in for busybox:1.37, with cp, ls and a libc for `model.Dockerfile`, and return its digest."""
    if found := digest(BUSYBOX):
        return found
    base_image()
    container = buildah("from", "--pull=never", BASE).strip()
    buildah("commit", "--rm", container, BUSYBOX)
    return digest(BUSYBOX)


def _commit(root: Path, name: str) -> None:
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, str(root), "/")
    buildah("commit", "--rm", container, name)


def build(target: str, **arguments: str) -> str:
    """Build a target of the Dockerfile from the working tree, and return the name of the image.

    Steps that did not change come from the store.
    """
    with FileLock(ROOT / "build" / "images.lock"):
        known = {"PYTHON_IMAGE": BASE, "PYTHON_DIGEST": base_image(), **arguments}
        known |= {"PIP_FIND_LINKS": LINKS} if target == "export" and LINKS else {}
        name = f"localhost/sharp:{target}"
        _bud("--target", target, "--tag", name, *_given(known), "--file", DOCKER / "Dockerfile", ROOT)
    return name


def build_model(folder: Path) -> str:
    """Build the image of a model folder, and return its name."""
    with FileLock(ROOT / "build" / "images.lock"):
        name = "localhost/sharp-model:0.1.0"
        known = {"BUSYBOX_IMAGE": BUSYBOX, "BUSYBOX_DIGEST": busybox_image()}
        _bud("--tag", name, *_given(known), "--file", DOCKER / "model.Dockerfile", folder)
    return name


def _bud(*arguments: str | Path) -> None:
    ignored = ("--ignorefile", DOCKER / "Dockerfile.dockerignore") if arguments[-1] == ROOT else ()
    # The build uses this machine's certificates, because packages may come through a proxy with its own.
    certificates = ("--volume", "/etc/ssl/certs:/etc/ssl/certs:ro")
    if Path(LINKS).is_absolute():
        certificates += ("--volume", f"{LINKS}:{LINKS}:ro")
    options = ("--layers", "--format", "docker", "--isolation", "chroot", "--pull=never")
    buildah("bud", *options, *certificates, *ignored, *arguments, seconds=BUILD_SECONDS)


def _given(arguments: dict[str, str]) -> list[str]:
    return [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
