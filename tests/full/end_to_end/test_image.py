"""The steps of deploy/docker/Dockerfile, run without Docker, install a server that works, and nothing more."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sharp import Client, SamplingParams
from sharp.serving.api.events import Finished
from tests.full.deploy.dockerfile import environment, lineage, read_stages
from tests.full.deploy.installed_image import installed
from tests.full.deploy.policies import END_SECONDS
from tests.full.end_to_end.commands import SCRIPTS

ROOT = Path(__file__).parents[3]
STAGES = read_stages((ROOT / "deploy" / "docker" / "Dockerfile").read_text())
DATA = {".html", ".css", ".js", ".jinja", ".json", ".md", ".proto", ".toml", ".yaml"}
# Commands of docs/deploy.md, exactly as the page has them.
EXPORT = "sharp-export models/checkpoints/text-ssa.safetensors --norm ssa -o build/deploy/text-ssa-ssa"
PLAN = "sharp plan build/deploy/text-ssa-ssa --gpu h100 --context 4096 --completion-tokens 256 --rate 50 --price 3.00"
GRACE_SECONDS = 2
STREAMS = 16
FORBIDDEN = ("torch", "transformers", "onnx", "onnxscript", "matplotlib", "pip", "grpc_tools", "ray")

# A container, as far as this machine can make one: everything is read-only but /tmp, which is new, and the user has no
# name, no home and no capabilities. This Python may lie in root's home, unlike in an image, so it is mounted again.
CONTAINER = f"""
mount --make-rprivate /
case {sys.base_prefix} in /root/*)
  mount --bind {sys.base_prefix} /mnt
  mount -t tmpfs -o mode=755 tmpfs /root
  mkdir -p {sys.base_prefix}
  mount --bind /mnt {sys.base_prefix}
  umount /mnt
esac
mount -t tmpfs tmpfs /tmp
mount -o remount,bind,ro /
exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


@pytest.fixture(scope="module")
def image():
    with installed(STAGES, "install") as folder:
        yield folder


def variables(image, **more):
    """Return the variables that the image sets, without those of this process."""
    known = environment(lineage(STAGES, "cpu"))
    known["PATH"] = known["PATH"].replace("/opt/sharp", str(image / "sharp")).replace("$PATH", os.defpath)
    return known | more


def inside(image, *command, **more):
    return subprocess.run(
        command, env=variables(image, **more), cwd="/", capture_output=True, text=True, timeout=60, check=False
    )


def test_only_what_serving_needs_is_there(image):
    code = f"from importlib.util import find_spec; print([name for name in {FORBIDDEN} if find_spec(name)])"
    result = inside(image, "python", "-c", code)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
    code = "from sharp.serving.backends.session import kernel_library; print(kernel_library())"
    assert inside(image, "python", "-c", code).stdout.startswith(str(image / "sharp"))
    (ours,) = (image / "sharp" / "lib").glob("python3.*/site-packages/sharp")
    ignored = ours / "models" / "checkpoints"  # Docker's build context leaves this folder out
    assert "models/checkpoints" in (ROOT / "deploy/docker/Dockerfile.dockerignore").read_text().splitlines()
    files = [path for path in ours.rglob("*") if path.is_file() and ignored not in path.parents]
    assert {path.suffix for path in files} <= {".py", ".pyi", ".pyc", ".so", *DATA}


def test_native_code_is_where_the_page_says(image):
    (folder,) = (image / "sharp" / "lib").glob("python3.*/site-packages")
    records = [(record.parent.name, record.read_text()) for record in folder.glob("*.dist-info/RECORD")]
    found = {name.partition("-")[0].replace("_", "-") for name, files in records if re.search(r"\.so[.,\d]", files)}
    (line,) = re.findall(
        r"^- Native code is in (.*?)as a test", (ROOT / "docs" / "security.md").read_text(), re.M | re.S
    )
    assert found == set(re.findall(r"`([\w-]+)`", line))


def test_the_list_of_what_is_there_is_whole(image):
    (command,) = next(stage for stage in STAGES if stage.name == "list").values("RUN")
    command = command.replace("/opt/tools/bin", str(SCRIPTS)).replace("/opt/sharp", str(image / "sharp"))
    listed = image / "sharp.cdx.json"
    subprocess.run(["bash", "-ec", command.replace("/sharp.cdx.json", str(listed))], check=True, timeout=120)
    bill = json.loads(listed.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    code = "from importlib.metadata import distributions as d; print(*sorted(f'{x.name}=={x.version}' for x in d()))"
    found = {f"{component['name']}=={component['version']}" for component in bill["components"]}
    assert found == set(inside(image, "python", "-c", code).stdout.split())
    assert {"sharp-attention", "onnxruntime", "grpcio"} <= {component["name"] for component in bill["components"]}


STARTS = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"  # starts a program of its own


def can_contain(folder):
    """Whether this user may make mounts, and a user without a name may start this Python."""
    command = [
        "unshare",
        "--mount",
        "bash",
        "-ec",
        CONTAINER,
        "bash",
        folder / "sharp" / "bin" / "python",
        "-c",
        STARTS,
    ]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def check_drain(process, address):
    """Assert that a server with long open streams ends within its grace period after SIGTERM."""
    ends: list[str] = []
    begun = threading.Barrier(STREAMS + 1)

    def read():
        params = SamplingParams(max_tokens=30_000, ignore_eos=True)
        with Client(address, attempts=1) as client:
            waiting = True
            for event in client.stream("The package", params):
                if waiting:
                    begun.wait(timeout=60)
                    waiting = False
                ends.extend([str(event.reason)] if isinstance(event, Finished) else [])

    threads = [threading.Thread(target=read) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(timeout=60)
    asked = time.monotonic()
    process.terminate()
    process.wait(timeout=60)
    assert time.monotonic() - asked < GRACE_SECONDS + END_SECONDS
    for thread in threads:
        thread.join()
    assert ends == ["cancelled"] * STREAMS


def test_it_serves_without_root_on_a_read_only_disk(image, tmp_path):
    if not can_contain(image):
        pytest.skip("needs root and mount namespaces; run the tests in a container with CAP_SYS_ADMIN")
    (tmp_path / "models").symlink_to(ROOT / "models")
    _, planned = (
        subprocess.run(
            [SCRIPTS / program, *arguments], cwd=tmp_path, check=True, timeout=600, capture_output=True, text=True
        ).stdout
        for program, *arguments in map(str.split, (EXPORT, PLAN))
    )
    assert "an estimate: nothing was measured on h100-sxm" in planned
    assert re.search(r"servers +\d+", planned)
    model = image / "model"
    shutil.copytree(tmp_path / "build" / "deploy" / "text-ssa-ssa", model)
    for path in (model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (entry,) = json.loads(lineage(STAGES, "cpu")[0].values("ENTRYPOINT")[0])
    options = ["--host", "127.0.0.1", "--grpc-port", "0", "--http-port", "0", "--grace-seconds", str(GRACE_SECONDS)]
    program = [image / "sharp" / "bin" / entry, model, *options]
    log = image / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["unshare", "--mount", "bash", "-ec", CONTAINER, "bash", *program],
            env=variables(image),
            cwd="/",
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60
        found = None
        while found is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            found = re.search(r"sharp-serve: ready grpc=(\S+) http=(\S+)", log.read_text())
        assert found, log.read_text()
        assert Path(f"/proc/{process.pid}/status").read_text().split("Uid:")[1].split()[:4] == ["10001"] * 4
        with Client(found[1]) as client:
            completion = client.generate("The package", SamplingParams(temperature=0, max_tokens=8))
        assert len(completion.token_ids) == 8
        health = json.loads(lineage(STAGES, "cpu")[0].values("HEALTHCHECK")[0].partition("CMD ")[2])
        port = found[2].rpartition(":")[2]
        assert inside(image, *health, SHARP_HTTP_PORT=port).returncode == 0
        check_drain(process, found[1])
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0, log.read_text()
    assert inside(image, *health, SHARP_HTTP_PORT=port).returncode == 1
    text = log.read_text()
    assert "our kernels" in text
    for complaint in ("telemetry", "Traceback", "Read-only", "Permission denied", "warning"):
        assert complaint not in text, text


def test_the_python_is_that_of_the_image():
    """This Python is the version that the image has, because wheels are for one version of Python."""
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    (version,) = re.findall(r"^ARG PYTHON_IMAGE=python:(\d+\.\d+)-", text, re.M)
    requires = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={version}"' in requires
    assert sys.version_info >= tuple(int(part) for part in version.split("."))
