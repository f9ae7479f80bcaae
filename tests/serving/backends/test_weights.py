"""A model whose files are overwritten or cut short while it is served."""

import json
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx.external_data_helper import set_external_data

from sharp.core.checksums import write_manifest
from sharp.core.manifest import read_manifest
from sharp.serving.api.errors import InputError
from sharp.serving.backends import load_backend
from sharp.serving.backends import weights as module
from sharp.serving.backends.weights import chosen_weights, copied_model
from tests.serving.conftest import make_model, wait_for, write_folder

DATA = "model.onnx.data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model whose floats are external data, and return its folder."""
    path = write_folder(tmp_path / "counting", hashing=0)
    model = make_model(0)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:  # the other initializers are shapes
            set_external_data(tensor, DATA)
    onnx.save(model, path / "model.onnx")
    write_manifest(path, read_manifest(path))
    return path


def ask(started):
    body = json.dumps({"prompt": "a", "max_tokens": 3, "temperature": 0}).encode()
    with urllib.request.urlopen(f"http://{started.http_address}/v1/completions", body, timeout=20) as response:
        return json.load(response)["choices"][0]["text"]


def ready(started, path="/health"):
    try:
        with urllib.request.urlopen(f"http://{started.http_address}{path}", timeout=10) as response:
            return response.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("harm", ["cut", "overwritten"])
def test_files_that_change_do_not_change_what_is_served(start_server, server_settings, folder, harm):
    """A server keeps serving the loaded weights when their file changes.

    Once the process ended without a line in the log (SIGBUS), or other tokens came with status 200.
    """
    started = start_server(folder, backend=server_settings.backend)
    assert ask(started) == "bcd"
    with (folder / DATA).open("r+b") as file:
        if harm == "cut":
            file.truncate(0)
        else:
            file.write(bytes((folder / DATA).stat().st_size))
    assert ask(started) == "bcd"
    assert ready(started)[0] == 200
    maps = Path("/proc/self/maps").read_text()
    assert str(folder / DATA) not in maps


def test_a_server_that_maps_changed_files_is_not_ready(start_server, server_settings, folder):
    started = start_server(folder, backend=replace(server_settings.backend, weights="map"))
    assert ask(started) == "bcd"
    (folder / DATA).touch()
    with (folder / "model.onnx").open("ab") as file:  # model.onnx is not mapped, so its change does not matter
        file.write(b"\0")
    wait_for(lambda: ready(started)[0] == 503)
    assert "the weights have changed while they were served" in ready(started)[1]
    assert ready(started, "/health/live")[0] == 200
    with pytest.raises(urllib.error.HTTPError, match="503"):
        ask(started)


def test_files_that_change_between_the_check_and_the_load_are_refused(server_settings, folder):
    manifest = read_manifest(folder)
    with (folder / DATA).open("r+b") as file:
        file.write(bytes(8))
    with pytest.raises(InputError, match="has changed while the model was loaded"):
        load_backend(folder, manifest, replace(server_settings.backend, weights="copy"))
    assert copied_model(folder, manifest, verify=False).external.keys() == {DATA}


def test_weights_are_copied_where_memory_has_room(folder, monkeypatch):
    manifest = read_manifest(folder)
    size = sum((folder / name).stat().st_size for name in ("model.onnx", DATA))
    for memory, chosen in ((3 * size, "copy"), (3 * size - 1, "map")):
        monkeypatch.setattr(module, "available_memory", lambda memory=memory: memory)
        assert chosen_weights(folder, manifest, "auto") == chosen
        assert chosen_weights(folder, manifest, "map") == "map"
