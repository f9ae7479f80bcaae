"""Weights of an untrusted model folder must lie in the folder and be as large as the model says."""

import os
import random
import shutil

import onnx
import pytest

from sharp import LLM
from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.forms.uncached.scoring import read_uncached


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return an exported folder, made once for all tests."""
    import torch
    from click.testing import CliRunner

    from sharp.exporter.cli import export
    from sharp.models.checkpoint import save_checkpoint
    from tests.exporter.conftest import tiny_model

    base = tmp_path_factory.mktemp("exported")
    save_checkpoint(base / "tiny.safetensors", tiny_model("softmax"), dtype=torch.float32)
    arguments = [str(base / "tiny.safetensors"), "--norm", "softmax", "-o", str(base / "out")]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 0, result.output
    return base / "out"


@pytest.fixture
def folder(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "model")


def change(folder, **entries):
    """Write `entries` into the external data of the first tensor that has any."""
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    tensor = next(initializer for initializer in model.graph.initializer if initializer.external_data)
    for entry in tensor.external_data:
        entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    "location", ["../secret", "{base}/secret", "link", "loop", "a/../../secret", "..\\secret", "C:\\secret", "", "\0"]
)
def test_weights_outside_the_folder_are_refused(folder, tmp_path, location):
    (tmp_path / "secret").write_bytes(bytes(1 << 20))
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to("loop")
    change(folder, location=location.format(base=tmp_path))
    # Since Python 3.13, a link to itself counts as a missing file.
    also = "|'loop' is missing" if location == "loop" else ""
    with pytest.raises(InputError, match=f"outside the model folder{also}"):
        LLM(folder)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "99999999"}, "bytes, but the weights"),
        ({"offset": "-8"}, "bytes, but the weights"),
        ({"length": "4"}, "wrong size for the weights"),
        ({"offset": "eight"}, "damaged"),
        ({"location": "gone.data"}, "'gone.data' is missing"),
        ({"location": "x" * 5000}, "is incomplete: 'xxx"),
        ({"location": "two\nlines"}, r"'two\\nlines' is missing"),
    ],
)
def test_sizes_are_checked(folder, entries, message):
    change(folder, **entries)
    with pytest.raises(InputError, match=message):
        read_manifest(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dimensions", [[2**50], [2**62] * 100_000])
def test_a_tensor_larger_than_any_memory_is_refused(folder, dimensions):
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    tensor = next(initializer for initializer in model.graph.initializer if initializer.external_data)
    tensor.dims.extend(dimensions)
    entry = next(item for item in tensor.external_data if item.key == "length")
    tensor.external_data.remove(entry)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="bytes, but the weights"):
        read_manifest(folder)


def test_truncated_weights_are_refused(folder):
    data = folder / "model.onnx.data"
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(InputError, match="copy or export the model again"):
        LLM(folder)


def test_weights_in_subgraphs_and_functions_are_checked_too(folder):
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    tensor = onnx.TensorProto(name="hidden", dims=[1], data_type=1, data_location=1)
    tensor.external_data.add(key="location", value="/etc/passwd")
    constant = onnx.helper.make_node("Constant", [], ["x"])
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    inner = onnx.GraphProto(node=[constant])
    nested = onnx.helper.make_node("If", ["c"], ["x"], then_branch=inner, else_branch=inner)
    model.functions[0].node.append(nested)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="outside the model folder"):
        read_manifest(folder)


def test_damaged_models_are_one_sentence_or_load(folder):
    """Models with bits flipped anywhere in the graph load or are refused with an InputError, and raise nothing else."""
    path = folder / "model.onnx"
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content[: rng.randint(1, len(content))] if rng.random() < 0.3 else content)
        try:
            read_manifest(folder)
        except InputError as error:
            assert "\n" not in str(error)


def test_an_empty_model_is_refused(folder):
    (folder / "model.onnx").write_bytes(b"")
    with pytest.raises(InputError, match="is empty"):
        read_manifest(folder)


def test_evaluation_and_inspection_read_through_the_same_check(folder):
    change(folder, location="/etc/passwd")
    with pytest.raises(InputError, match="outside the model folder"):
        read_uncached(folder)
