"""Folders from before the op `Attention` was renamed `SharpAttention` load and give the same numbers."""

import shutil

import numpy as np
import onnx
import pytest

from sharp.core.checksums import damaged_files
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.plugins.cuda.model_kernels import options_of_model
from sharp.plugins.op.function_body import attach_function
from tests.exporter.conftest import give_the_old_name

PROMPT = np.array([[72, 101, 108, 108, 111]])


@pytest.fixture
def folders(checkpoint, sharp_export, tmp_path):
    """Return a folder of today, and a copy of it with the old name of the op."""
    out = tmp_path / "out"
    exported = sharp_export(checkpoint("asentmax"), "--norm", "asentmax", "--cache", "contiguous", "-o", out)
    assert exported.exit_code == 0, exported.output
    old = shutil.copytree(out, tmp_path / "old")
    give_the_old_name(old)
    assert {node.op_type for node in ours(old)} == {"Attention"} and not damaged_files(old)
    return out, old


def ours(folder):
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    return [node for node in model.graph.node if node.domain == "ai.sharp"]


def test_an_old_folder_loads_with_and_without_kernels(folders):
    out, old = folders
    assert {node.op_type for node in ours(out)} == {"SharpAttention"}
    expected = ContiguousSession(out, kernels=True).generate(PROMPT, 8)
    for kernels in (True, False):
        np.testing.assert_array_equal(ContiguousSession(old, kernels=kernels).generate(PROMPT, 8), expected)
    # The kernels are also found by the old name: without its body, nothing else can compute the node.
    model = onnx.load(old / "model.onnx", load_external_data=False)
    del model.functions[:]
    onnx.save(model, old / "model.onnx")
    np.testing.assert_array_equal(ContiguousSession(old, kernels=True).generate(PROMPT, 8), expected)
    with pytest.raises(Exception, match="Attention"):
        ContiguousSession(old, kernels=False)


def test_an_old_folder_gets_kernels_and_bodies(folders):
    out, old = folders
    assert options_of_model(old) == options_of_model(out)
    model = onnx.load(old / "model.onnx", load_external_data=False)
    body = model.functions[0].SerializeToString()
    attach_function(model)
    assert [function.name for function in model.functions] == ["Attention"]
    assert model.functions[0].SerializeToString() == body
