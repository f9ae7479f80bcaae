"""The init container of model-from-hub exports a model of the Hub once, and copies the export for every pod."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from sharp.core.manifest import read_manifest
from tests.full.deploy.policies.documents import environment, pods
from tests.full.deploy.rendering import KUBERNETES, render, write_kustomization

COMPONENT = KUBERNETES / "components" / "model-from-hub"
SCRIPTS = Path(sys.executable).parent
REVISION = "0" * 39 + "1"
NAME = "people/tiny"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the folder of a Llama that the Hub might have."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder := tmp_path_factory.mktemp("checkpoint"))
    return folder


@pytest.fixture
def hub(checkpoint):
    """Yield the address of a server with the Hub's interface for one model, and the list of requested paths."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(path := urlsplit(self.path).path)
            files = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
            listing = {"id": NAME, "sha": REVISION, "siblings": [{"rfilename": name} for name in files]}
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]
            answers = {f"/{NAME}/resolve/{REVISION}/{name}": data for name, data in files.items()}
            answers |= {
                f"/api/models/{NAME}/revision/{ref}": json.dumps(listing).encode() for ref in ("main", REVISION)
            }
            answers[f"/api/models/{NAME}"] = json.dumps(listing).encode()
            answers[f"/api/models/{NAME}/tree/{REVISION}"] = json.dumps(tree).encode()
            answer = answers.get(path)
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(answer or b"")))
            self.send_header("ETag", f'"{hashlib.sha256(answer or b"").hexdigest()}"')
            self.send_header("X-Repo-Commit", REVISION)
            if answer is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(answer or b"")

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


class Containers:
    """Init containers of pods that share a cache, run as processes with the manifests' command and variables."""

    def __init__(self, folder, hub):
        self.folder, self.hub = folder, hub
        (folder / "cache").mkdir()

    def command(self, pod, model, options):
        """Return the arguments of `subprocess` for one pod's init container."""
        overlay = self.folder / f"{pod}-overlay"
        chosen = {"MODEL_ID": model, "MODEL_OPTIONS": options}
        patch = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "sharp-model"}, "data": chosen}
        documents = render(
            write_kustomization(overlay, ["cpu", "model-from-hub"], patches=[{"patch": yaml.safe_dump(patch)}])
        )
        (found,) = pods(documents)
        (container,) = found.spec["initContainers"]
        (self.folder / pod).mkdir()
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        places = {"model": self.folder / pod, "cache": self.folder / "cache", "fetch": COMPONENT, "hub": self.folder}

        def here(text):
            for path, volume in mounts.items():
                text = str(places[volume]) + text.removeprefix(path) if text.startswith(path) else text
            return text

        variables = {name: here(value) for name, value in environment(documents, container).items()}
        own = {"HF_ENDPOINT": self.hub, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        path = {"PATH": f"{SCRIPTS}:{os.environ['PATH']}"}
        program, *arguments = container["command"]
        assert program == "python3"
        return [sys.executable, *map(here, arguments)], variables | own | path

    def run(self, pod, model=NAME, options="--norm softmax"):
        command, variables = self.command(pod, model, options)
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def containers(tmp_path, hub):
    return Containers(tmp_path, hub[0])


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_is_exported_once_for_all_pods(containers, hub, checkpoint):
    _, asked = hub
    first = containers.run("first")
    assert first.returncode == 0, first.stderr
    manifest = read_manifest(containers.folder / "first")
    assert (manifest.name, manifest.verified, manifest.norm.name) == ("tiny", True, "softmax")
    (weights,) = checkpoint.glob("*.safetensors")
    assert f"/{NAME}/resolve/{REVISION}/{weights.name}" in asked
    asked.clear()
    second = containers.run("second")
    assert (second.returncode, asked) == (0, []), second.stderr
    assert content(containers.folder / "second") == content(containers.folder / "first")
    # A container that was restarted in the same pod finds the model in its place.
    command, variables = containers.command("third", NAME, "--norm softmax")
    for _ in range(2):
        subprocess.run(command, env=variables, check=True, timeout=60, capture_output=True)
    assert content(containers.folder / "third") == content(containers.folder / "first")
    # Other options are another model.
    refused = containers.run("fourth", options="--norm unheard-of")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "unheard-of" in refused.stderr
    assert content(containers.folder / "fourth") == {}


@pytest.mark.parametrize(
    ("model", "options", "code", "expected"),
    [
        ("unset", "", 1, "export_model: MODEL_ID is 'unset'; it must be organization/name"),
        ("/etc/passwd", "", 1, "export_model: MODEL_ID is '/etc/passwd'; it must be organization/name"),
        (NAME, "--norm 'softmax", 1, "export_model: MODEL_OPTIONS are not options of sharp-export: No closing"),
        ("people/nobody", "--norm softmax", 2, "no model of this name on the Hugging Face Hub"),
    ],
    ids=["unset", "path", "options", "nobody"],
)
def test_nothing_arrives_but_one_sentence(containers, model, options, code, expected):
    result = containers.run("pod", model, options)
    assert (result.returncode, result.stderr.count("\n")) == (code, 1), result.stderr
    assert expected in result.stderr
    assert content(containers.folder / "pod") == {}


def test_two_pods_at_once_export_once(containers, tmp_path):
    """One of two pods that start together exports, while the other waits for the export.

    A stand-in for sharp-export takes a second and counts its calls.
    """
    stand_in = tmp_path / "bin" / "sharp-export"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/sh\necho call >> {tmp_path}/calls\nsleep 1\nmkdir "$5"\necho "{{}}" > "$5/sharp.json"\n'
    )
    stand_in.chmod(0o755)
    running = []
    for pod in ("first", "second"):
        command, variables = containers.command(pod, NAME, "--norm softmax")
        variables["PATH"] = f"{stand_in.parent}:{variables['PATH']}"
        running.append(subprocess.Popen(command, env=variables))
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    assert (tmp_path / "calls").read_text() == "call\n"
    assert content(tmp_path / "first") == content(tmp_path / "second") == {"sharp.json": b"{}\n"}
