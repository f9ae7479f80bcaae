"""Targets for files from someone else that are read fast enough for millions of runs; `readers.py` has all readers."""

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from sharp.core.checksums import verify_files, write_manifest
from sharp.core.external_data import check_external_data
from sharp.core.manifest import read_manifest
from sharp.exporter.checkpoints.gguf.file import check_gguf_header
from sharp.exporter.inspection.folder import read_graph
from sharp.exporter.programs.archive import load_program
from sharp.plugins.op.graph_attention import attention_nodes, showing
from sharp.plugins.op.schema import PAGED_ATTENTION
from tests.full.fuzz.mutations import change_json
from tests.full.fuzz.readers import READERS, Reader
from tests.full.fuzz.structured import Mutation, of_bytes, of_json, of_message
from tests.full.fuzz.targets import Target
from tests.serving.conftest import write_folder

BY_NAME: dict[str, Reader] = {reader.name: reader for reader in READERS}


def of_file(path: Path, seeds: list[bytes], read: Callable[[], object], mutate: Mutation = of_bytes) -> Target:
    """Return a target whose bytes are the content of the file at `path`."""

    def run(content: bytes) -> None:
        path.write_bytes(content)
        read()

    return Target(run, seeds, mutate)


def reader(name: str, *, is_json: bool = False) -> Callable[[Path], Target]:
    """Return a maker of the target of the reader `name` in `READERS`."""

    def make(folder: Path) -> Target:
        one = BY_NAME[name]
        one.make(folder)
        whole = (folder / one.file).read_bytes()
        return of_file(folder / one.file, [whole], lambda: one.read(folder), of_json(whole) if is_json else of_bytes)

    return make


def manifest(folder: Path) -> Target:
    """Return the target of `sharp.json` in a small model folder."""
    path = write_folder(folder / "counting", hashing=0)
    write_manifest(path, read_manifest(path))
    whole = (path / "sharp.json").read_bytes()
    return of_file(path / "sharp.json", [whole], lambda: verify_files(path, read_manifest(path)), of_json(whole))


def external_weights() -> onnx.ModelProto:
    """Return a model whose weights are in a file of its folder."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", "24")):
        tensor.external_data.add(key=key, value=value)
    inner = helper.make_graph([], "inner", [], [], [tensor])
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    return helper.make_model(helper.make_graph([node], "g", [], [value], [tensor]))


def onnx_weights(folder: Path) -> Target:
    """Return the target of the places at which a graph says that its weights are."""
    (folder / "weights.bin").write_bytes(bytes(24))
    seeds = [external_weights().SerializeToString()]

    def read() -> None:
        check_external_data(folder, "model.onnx")

    return of_file(folder / "model.onnx", seeds, read, of_message(onnx.ModelProto))


def onnx_graph(folder: Path) -> Target:
    """Return the target of graphs as `sharp inspect` reads them, and as a server reads them, without onnx."""
    node = helper.make_node(
        PAGED_ATTENTION.name,
        ["q", "k", "v", "key_cache.0", "value_cache.0", *PAGED_ATTENTION.input_names[5:9]],
        list(PAGED_ATTENTION.output_names),
        domain="ai.sharp",
        normalizer="ssa",
        scale=1.0,
    )
    products = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Split", ["p", "s"], ["q0", "k0"], axis=-1),
        helper.make_node("Reshape", ["q0", "r"], ["q"]),
        helper.make_node("Reshape", ["k0", "r"], ["k"]),
    ]
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, [2, 4], np.zeros(8, np.float32).tolist()),
        helper.make_tensor("s", TensorProto.INT64, [2], [2, 2]),
        helper.make_tensor("r", TensorProto.INT64, [3], [0, 1, 2]),
    ]
    model = helper.make_model(helper.make_graph([*products, node], "g", [], [], weights))

    file = folder / "model.onnx"

    def read() -> None:
        content = file.read_bytes()
        showing(content, attention_nodes(content))
        for found in read_graph(file, PAGED_ATTENTION)[1]:
            found.added_outputs()

    return of_file(file, [model.SerializeToString()], read, of_message(onnx.ModelProto))


def gguf_header(folder: Path) -> Target:
    """Return the target of the start of a GGUF file."""
    path = folder / "tiny.gguf"
    return of_file(path, [b"GGUF" + bytes(20)], lambda: check_gguf_header(path))


def of_zip(whole: bytes, names: list[str], of_part: Mutation) -> Mutation:
    """Return a mutation of an archive that changes one of the parts `names`."""

    def mutate(content: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return of_bytes(content, rng)
        try:
            held = parts_of(content)
        except Exception:
            held = parts_of(whole)
        chosen = rng.choice(names)
        held[chosen] = of_part(held.get(chosen, b""), rng)
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, part in held.items():
                archive.writestr(zipfile.ZipInfo(name), part)
        return file.getvalue()

    return mutate


def parts_of(content: bytes) -> dict[str, bytes]:
    """Return the parts of an archive by name."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pickled_checkpoint(folder: Path) -> Target:
    """Return the target of a `.pt` file, most of whose damage is in its pickle."""
    one = BY_NAME["checkpoint.pt"]
    one.make(folder)
    path = folder / one.file
    whole = path.read_bytes()
    names = [name for name in parts_of(whole) if name.endswith("data.pkl")]
    return of_file(path, [whole], lambda: one.read(folder), of_zip(whole, names, of_bytes))


def tensors(folder: Path) -> Target:
    """Return the target of a `.safetensors` file, most of whose damage is in its header."""
    one = BY_NAME["checkpoint.safetensors"]
    one.make(folder)
    path = folder / one.file

    def mutate(content: bytes, rng: random.Random) -> bytes:
        return (of_bytes if rng.random() < 0.2 else change_json)(content, rng)

    return of_file(path, [path.read_bytes()], lambda: one.read(folder), mutate)


class _Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).reshape(x.shape[0], -1).softmax(-1)


def program(folder: Path) -> Target:
    """Return the target of a `.pt2` file, most of whose damage is in its JSON."""
    path = folder / "small.pt2"
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    torch.export.save(torch.export.export(_Small(), (torch.ones(3, 2),), dynamic_shapes=sizes), path)
    whole = path.read_bytes()
    parts = parts_of(whole)
    documents = [name for name, content in parts.items() if name.endswith(".json") and content.startswith(b"{")]
    mutate = of_zip(whole, documents, of_json(*(parts[name] for name in documents)))
    return of_file(path, [whole], lambda: load_program(path), mutate)


MAKERS: dict[str, Callable[[Path], Target]] = {
    "sharp.json": manifest,
    "engine-manifest": reader("engine", is_json=True),
    "temperature-preset": reader("preset", is_json=True),
    "onnx-weights": onnx_weights,
    "onnx-graph": onnx_graph,
    "gguf-header": gguf_header,
    "checkpoint.safetensors": tensors,
    "checkpoint.pt": pickled_checkpoint,
    "config.json": reader("own-folder-config.json", is_json=True),
    "generation_config.json": reader("own-folder-generation_config.json", is_json=True),
    "program.pt2": program,
}
