"""Every shell script ends with one sentence, and never silently, in a container that lacks what the script needs."""

import re
import subprocess

import pytest

from tests.full.deploy.built_images import BASE, BUILD_SECONDS, base_image, run
from tests.full.deploy.rendering import ROOT
from tests.full.deploy.running_pod import PODMAN, RLIMITS

SCRIPTS = {
    "cmake/onnxruntime_headers.sh": ("/work/headers", 2),
    "cmake/prerequisites.sh": ("python3", 2),
    "cmake/prometheus.sh": ("/work/prometheus", 0),  # the tests that need Prometheus are skipped
    "tests/full/clients/install.sh": ("python3", 2),
    "tests/full/deploy/tools.sh": ("", 2),
    "tests/full/release/arm_root.sh": ("/work/arm", 2),
}
# Programs and files that each system lacks, besides a network and lists of packages. No system has
# /etc/apt/sources.list, as in python:3.11-slim.
SYSTEMS = {
    "debian": "true",
    "without-apt": "rm /usr/bin/apt-get /usr/bin/apt /usr/bin/dpkg-deb /usr/bin/dpkg; rm -r /etc/apt",
    "fedora": "rm /usr/bin/apt* /usr/bin/dpkg*; rm -r /etc/apt /var/lib/apt /var/lib/dpkg; "
    "printf 'ID=fedora\\n' > /etc/os-release; printf '#!/bin/sh\\nexit 1\\n' > /usr/bin/dnf; chmod +x /usr/bin/dnf",
    "without-python": "rm -f /usr/bin/python3*",
    "without-sources": "rm -r /etc/apt/sources.list.d",
}


def test_every_script_is_here():
    listed = subprocess.run(["git", "ls-files", "*.sh"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(listed.split()) == set(SCRIPTS)


def run_all(system):
    """Run all scripts in one container without a network; return {script: (exit code, lines on stderr)}.

    Each script gets its own copy of each folder.
    """
    parts = [SYSTEMS[system], "mkdir -p /work && cd /work"]
    for number, (script, (argument, _)) in enumerate(SCRIPTS.items()):
        parts.append(f"bash /src/{script} {argument} > /dev/null 2> /work/{number}.log; echo $? > /work/{number}.code")
    parts.append("cd /work && tail -n +1 [0-9]*.code [0-9]*.log")
    options = ["--rm", "--network", "none", *RLIMITS, "--volume", f"{ROOT}:/src:ro"]
    said = run(*PODMAN, "run", *options, BASE, "bash", "-c", "; ".join(parts), seconds=600)
    files = dict(re.findall(r"^==> (\S+) <==\n(.*?)(?=\n==> |\Z)", said, re.M | re.S))
    return {
        script: (int(files[f"{number}.code"]), files[f"{number}.log"].strip().splitlines())
        for number, script in enumerate(SCRIPTS)
    }


@pytest.mark.timeout(BUILD_SECONDS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_scripts_say_what_is_missing(system, image_store):
    base_image()
    found = run_all(system)
    assert {script: code for script, (code, _) in found.items()} == {one: code for one, (_, code) in SCRIPTS.items()}
    assert {script: lines for script, (_, lines) in found.items() if len(lines) != 1 or len(lines[0]) < 40} == {}
