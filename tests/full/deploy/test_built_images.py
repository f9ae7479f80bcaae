"""The images, built and run with the manifests' own security context, limits, probes, preStop and grace."""

import json
import re
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sharp import Client, SamplingParams
from sharp.serving.api.events import Finished
from tests.full.deploy.built_images import BUILD_SECONDS, build, build_model, buildah, run
from tests.full.deploy.policies.documents import settings
from tests.full.deploy.policies.servers import END_SECONDS
from tests.full.deploy.rendering import ROOT, render, write_kustomization
from tests.full.deploy.running_pod import PODMAN, RLIMITS, claim, running_pod, secret

TOKEN = "0123456789abcdef0123456789abcdef"
GREEDY = SamplingParams(temperature=0, max_tokens=8)
GROUP = 10001
COMPLAINTS = ("Traceback", "Read-only file system", "Permission denied", "telemetry")


# A build is part of the first test's time.
pytestmark = pytest.mark.timeout(BUILD_SECONDS + 600)


@pytest.fixture(scope="module")
def image(image_store):
    return build("cpu")


@pytest.fixture(scope="module")
def documents(image_store, tmp_path_factory):
    return render(write_kustomization(tmp_path_factory.mktemp("overlay"), ["cpu", "model-from-pvc"]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Export the model of docs/deploy.md, and return its folder."""
    folder = tmp_path_factory.mktemp("model") / "text-ssa-ssa"
    checkpoint = ROOT / "models" / "checkpoints" / "text-ssa.safetensors"
    command = [Path(sys.executable).parent / "sharp-export", checkpoint, "--norm", "ssa", "-o", folder]
    run(*command, seconds=900)
    return folder


@pytest.fixture(scope="module")
def volumes(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("volumes")
    return {"model": claim(folder / "claim", model), "auth": secret(folder / "auth", GROUP, tokens=f"{TOKEN}\n")}


def get(pod, path, token=None, body=None):
    """Return the status and the body of a response."""
    request = urllib.request.Request(f"http://{pod.address}:{pod.ports['http']}{path}", body)
    request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def complete(pod, token=TOKEN, **fields):
    body = {"model": "text-ssa-ssa", "prompt": "The package", "max_tokens": 8, "temperature": 0} | fields
    return get(pod, "/v1/completions", token, json.dumps(body).encode())


def client(pod, **options):
    return Client(f"{pod.address}:{pod.ports['grpc']}", token=TOKEN, **options)


@pytest.fixture(scope="module")
def pod(image, documents, volumes):
    with running_pod(documents, image, volumes) as pod:
        pod.wait_until_started()
        yield pod


def test_the_container_is_what_the_manifest_says(pod):
    found = pod.inspect()
    limits = pod.container["resources"]["limits"]
    assert found["HostConfig"]["Memory"] == int(limits["memory"].removesuffix("Gi")) * 2**30
    status = pod.execute("cat", "/proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert (fields["NoNewPrivs"], fields["Seccomp"], fields["CapBnd"]) == ("1", "2", "0" * 16)
    memory = pod.execute("cat", "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max").stdout
    assert str(found["HostConfig"]["Memory"]) in memory
    refused = pod.execute("sh", "-c", "echo > /opt/sharp/x || echo > /model/x")
    assert refused.returncode != 0
    assert "Read-only file system" in refused.stderr


def test_it_generates_over_both_ports(pod):
    assert all(pod.probe(kind) for kind in ("startup", "readiness", "liveness"))
    status, body = complete(pod)
    assert status == 200
    with client(pod) as asked:
        assert asked.generate("The package", GREEDY).text == json.loads(body)["choices"][0]["text"]
    assert complete(pod, token=None)[0] == 401
    status, metrics = get(pod, "/metrics")
    assert status == 200
    (generated,) = re.findall(r'^sharp_generated_tokens_total\{model="text-ssa-ssa"\} (\S+)', metrics, re.M)
    assert float(generated) == 16
    assert re.search(r'^sharp_refusals_total\{.*reason="unauthenticated".*status="401"\} 1\.0', metrics, re.M)


def test_the_health_check_of_the_image_succeeds(pod):
    assert pod.inspect()["Config"]["Healthcheck"]["Test"] == ["CMD", "sharp", "health"]
    assert pod.execute("sharp", "health").returncode == 0


def test_it_holds_nothing_that_serving_does_not_need(pod):
    code = (
        "from importlib.util import find_spec as f; print([n for n in ('torch', 'transformers', 'pip', 'ray') if f(n)])"
    )
    assert pod.execute("python", "-c", code).stdout.strip() == "[]"
    assert pod.execute("sh", "-c", "command -v gcc g++ cc").returncode != 0


def test_it_drains_within_the_grace(image, documents, volumes):
    """The pod drains within the grace period.

    preStop and then SIGTERM come while a stream runs that would take far longer.
    """
    with running_pod(documents, image, volumes) as pod:
        pod.wait_until_started()
        chosen = settings(documents, pod.pod)
        ends: list[str] = []
        begun = threading.Event()

        def read():
            with client(pod, attempts=1) as asked:
                for event in asked.stream("The package", SamplingParams(max_tokens=30_000, ignore_eos=True)):
                    begun.set()
                    ends.extend([str(event.reason)] if isinstance(event, Finished) else [])

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        code, seconds = pod.terminate()
        thread.join(60)
        assert (code, len(ends)) == (0, 1), pod.log()
        assert seconds < pod.spec["terminationGracePeriodSeconds"]
        waits = float(pod.container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert seconds < waits + chosen.grace_seconds + END_SECONDS
        assert pod.changes() == []
        log = pod.log()
        for complaint in COMPLAINTS:
            assert complaint not in log, log


def test_a_model_that_is_missing_is_one_sentence(image, documents, volumes, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with running_pod(documents, image, volumes | {"model": empty}) as pod:
        assert run(*PODMAN, "wait", pod.name).strip() == "2"
        (line,) = [line for line in pod.log().splitlines() if "sharp.json" in line]
        assert "Traceback" not in pod.log()
        assert line.startswith("Error: /model is not a model folder")


def labelled(folder, version):
    """Return the manifests with a label for the model's version, as docs/deploy.md writes the label."""
    labels = [{"pairs": {"sharp-model-version": version}, "includeTemplates": True}]
    return render(write_kustomization(folder, ["cpu", "model-from-pvc"], labels=labels))


def test_the_label_is_the_version_of_the_model(image, model, volumes, tmp_path):
    """A pod with the label serves the model of that version; a pod with another version in the label does not start."""
    version = run("sha256sum", model / "sharp.json").split()[0][:12]
    with running_pod(labelled(tmp_path / "right", version), image, volumes) as pod:
        pod.wait_until_started()
        assert pod.pod.labels["sharp-model-version"] == version
        assert f'sharp_model_info{{model="text-ssa-ssa",norm="ssa",version="{version}"}} 1.0' in get(pod, "/metrics")[1]
    with running_pod(labelled(tmp_path / "wrong", "0123456789ab"), image, volumes) as pod:
        assert run(*PODMAN, "wait", pod.name).strip() == "2"
        (line,) = [line for line in pod.log().splitlines() if "version" in line]
        assert line.startswith(f"Error: /model has the version {version}, not 0123456789ab")


def test_the_model_arrives_from_an_image(image, model, tmp_path):
    """The init container of `model-from-image` copies the folder out of an image that model.Dockerfile made."""
    own = build_model(model)
    documents = render(write_kustomization(tmp_path / "overlay", ["cpu", "model-from-image"]))
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o775)
    run("chown", f"{GROUP}:{GROUP}", copy)
    auth = secret(tmp_path / "auth", GROUP, tokens=f"{TOKEN}\n")
    (pod,) = [document["spec"]["template"]["spec"] for document in documents if document["kind"] == "Deployment"]
    (init,) = pod["initContainers"]
    with running_pod(documents, own, {"model": copy}, init) as copying:
        assert run(*PODMAN, "wait", copying.name).strip() == "0", copying.log()
    assert {path.name for path in copy.iterdir()} == {path.name for path in model.iterdir()}
    with running_pod(documents, image, {"model": copy, "auth": auth}) as served:
        served.wait_until_started()
        assert complete(served)[0] == 200


def test_the_image_that_exports_has_the_exporter(image_store):
    """The image `export` exports a checkpoint of the repository under the init container's security context."""
    name = build("export")
    options = ("--rm", "--network", "none", *RLIMITS, "--read-only", "--cap-drop", "ALL", "--tmpfs", "/copy:mode=1777")
    mounts = ("--volume", f"{ROOT / 'models' / 'checkpoints'}:/checkpoints:ro", "--env", "HOME=/copy")
    arguments = ("/checkpoints/text-ssa.safetensors", "--norm", "ssa", "--output", "/copy/model", "--json")
    said = run(*PODMAN, "run", *options, *mounts, "--env", "TMPDIR=/copy", name, *arguments, seconds=1800)
    assert json.loads(said)["passed"] is True


def test_the_bill_of_materials_is_that_of_the_image(image):
    container = buildah("from", "--pull=never", build("sbom")).strip()
    listing = (Path(buildah("mount", container).strip()) / "sharp.cdx.json").read_text()
    buildah("rm", container)
    found = {f"{component['name']}=={component['version']}" for component in json.loads(listing)["components"]}
    code = "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x in d()))"
    options = ("--rm", "--network", "none", *RLIMITS, "--entrypoint", "python")
    said = run(*PODMAN, "run", *options, image, "-c", code)
    assert found == set(said.split())
