"""A model image is pushed to a registry on 127.0.0.1, pulled by the digest that an overlay names, and served.

The base image is empty in place of busybox, because only the init container of `model-from-image` runs a program of it;
`test_built_images.py` runs that init container.
"""

import re
import subprocess
import time

import pytest

from sharp import Client, SamplingParams
from tests.full.deploy.built_images import DOCKER, REGISTRY, check_tools, run
from tests.full.deploy.policies.documents import pods
from tests.full.deploy.rendering import render, write_kustomization
from tests.full.end_to_end.commands import serve

BASE = "localhost/empty:1"
CONFIGURATION = """version: 0.1
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:0"}}
"""
ADDRESS = re.compile(r"listening on (127\.0\.0\.1:\d+)")


class Store:
    """A store of images of its own, as each node of a cluster has one."""

    def __init__(self, folder):
        self._options = ("--storage-driver", "vfs", "--root", folder / "store", "--runroot", folder / "run")

    def buildah(self, *arguments):
        return run("buildah", *self._options, *arguments).strip()

    def build(self, model, image):
        """Build the image of a model folder by model.Dockerfile."""
        self.buildah("commit", "--rm", self.buildah("from", "scratch"), BASE)
        digest = self.buildah("images", "--format", "{{.Digest}}", BASE)
        known = ("--build-arg", f"BUSYBOX_IMAGE={BASE}", "--build-arg", f"BUSYBOX_DIGEST={digest}")
        options = ("--isolation", "chroot", "--pull=never", *known, "--file", DOCKER / "model.Dockerfile")
        self.buildah("bud", *options, "--tag", image, model)

    def push(self, image, folder):
        """Push an image, and return the digest of its manifest."""
        file = folder / "digest"
        self.buildah("push", "--tls-verify=false", "--digestfile", file, image, f"docker://{image}")
        return file.read_text()

    def mount(self, reference):
        """Pull an image, and return the folder with its files, which a kubelet would mount as the image volume."""
        self.buildah("pull", "--tls-verify=false", reference)
        return self.buildah("mount", self.buildah("from", "--pull=never", reference))


@pytest.fixture
def registry(tmp_path):
    """Yield the address of a registry, whose files are in `tmp_path`."""
    check_tools("buildah", REGISTRY)
    configuration, log = tmp_path / "registry.yml", tmp_path / "registry.log"
    configuration.write_text(CONFIGURATION.format(root=tmp_path / "registry"))
    with log.open("wb") as output:
        process = subprocess.Popen([REGISTRY, "serve", configuration], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 30
        while not (found := ADDRESS.search(log.read_text())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found, log.read_text()
        yield found[1]
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def pushed(registry, counting, tmp_path):
    """Push a model's image to the registry, and return {its name, its digest} as an overlay names them."""
    maker = Store(tmp_path / "maker")
    image = f"{registry}/sharp-model:0.1.0"
    maker.build(counting, image)
    return {"name": "sharp-model", "newName": f"{registry}/sharp-model", "digest": maker.push(image, tmp_path)}


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rendered(folder, component, image):
    """Return the pod of an overlay that names the image of the model."""
    (pod,) = pods(render(write_kustomization(folder, ["cpu", component], images=[image])))
    return pod


def test_the_image_volume_of_the_digest_is_served(pushed, counting, tmp_path):
    pod = rendered(tmp_path / "overlay", "model-from-image-volume", pushed)
    (volume,) = (volume for volume in pod.spec["volumes"] if volume["name"] == "model")
    assert volume["image"]["reference"] == f"{pushed['newName']}@{pushed['digest']}"
    root = Store(tmp_path / "node").mount(volume["image"]["reference"])
    (mount,) = (mount["mountPath"] for mount in pod.server["volumeMounts"] if mount["name"] == "model")
    (folder,) = (tmp_path / argument.replace(mount, root, 1) for argument in pod.server["args"])
    assert content(folder) == content(counting)
    assert all(path.stat().st_mode & 0o004 for path in folder.rglob("*"))  # another user than the image's may serve it
    version = run("sha256sum", counting / "sharp.json")[:12]
    with serve(folder, "--model-version", version) as server, Client(server.grpc) as client:
        assert client.generate("abc", SamplingParams(temperature=0, max_tokens=3)).text == "def"


def test_the_init_container_copies_the_image_of_the_digest(pushed, counting, tmp_path):
    pod = rendered(tmp_path / "overlay", "model-from-image", pushed)
    (init,) = pod.spec["initContainers"]
    assert init["image"] == f"{pushed['newName']}@{pushed['digest']}"
    root, copy = Store(tmp_path / "node").mount(init["image"]), tmp_path / "copy"
    copy.mkdir()
    places = {"/models": f"{root}/models", "/copy": str(copy)}
    run(*(re.sub("^(/models|/copy)", lambda found: places[found[0]], word) for word in init["command"]))
    assert content(copy) == content(counting)


def test_a_digest_names_one_image_whatever_the_tag_names(pushed, hashing, counting, registry, tmp_path):
    """A node pulls what the digest names after the tag was pushed again, and nothing for a digest that is unknown."""
    maker, image = Store(tmp_path / "second"), f"{registry}/sharp-model:0.1.0"
    maker.build(hashing, image)
    second = maker.push(image, tmp_path)
    assert second != pushed["digest"]
    node = Store(tmp_path / "node")
    by_digest = node.mount(f"{pushed['newName']}@{pushed['digest']}")
    assert content(tmp_path / by_digest / "models") == content(counting)
    assert content(tmp_path / node.mount(image) / "models") == content(hashing)
    with pytest.raises(AssertionError, match="manifest unknown"):
        node.mount(f"{pushed['newName']}@sha256:{'0' * 64}")


def test_a_damaged_image_is_not_pulled(pushed, counting, tmp_path):
    """The registry sends a layer that is not that of the manifest, and the pull fails."""
    blobs = list((tmp_path / "registry").rglob("blobs/sha256/*/*/data"))
    layer = max(blobs, key=lambda path: path.stat().st_size)
    layer.write_bytes(layer.read_bytes()[:-1] + b"?")
    with pytest.raises(AssertionError, match="Digest did not match"):
        Store(tmp_path / "node").mount(f"{pushed['newName']}@{pushed['digest']}")
