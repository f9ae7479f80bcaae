"""`sharp-export --target portable` writes standard ops only, so that any tool reads the model without Sharp."""

import numpy as np
import onnx
import onnxruntime
import pytest

from sharp.core.manifest import read_manifest
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.config import BackendConfig
from tests.exporter.tiny_hugging_face import save, tiny
from tests.marks import full
from tests.tensorrt_rtx import build_engine


def nodes_of(graph):
    """Yield the nodes of a graph, those of inner graphs included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)


@pytest.mark.parametrize(
    ("norm", "cache"),
    [
        ("ssa", "paged"),
        full("asentmax", "contiguous"),
        full("adaptive-temperature", "none"),
    ],
)
def test_every_form_is_standard_onnx(checkpoint, sharp_export, tmp_path, norm, cache):
    source, out = checkpoint(norm, "nape"), tmp_path / "out"
    result = sharp_export(source, "--norm", norm, "--cache", cache, "--target", "portable", "-o", out)
    assert result.exit_code == 0, result.output  # the export is verified in ONNX Runtime without Sharp's library
    manifest = read_manifest(out)
    assert manifest.target == "portable"
    assert {comparison["runtime"] for comparison in manifest.verification["comparisons"]} == {"inlined"}
    path = out / "model.onnx"
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}
    assert [imported.domain for imported in model.opset_import] == [""]
    constants = [node.attribute[0].name for node in nodes_of(model.graph) if node.op_type == "Constant"]
    assert set(constants) == {"value"}  # onnxslim and ONNX Runtime's float16 converter misread `value_float`
    used = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.input}
    assert {tensor.name for tensor in model.graph.initializer} <= used
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert build_engine(model, path).nbytes > 0


@pytest.mark.full
def test_windows_and_soft_caps_come_along(sharp_export, tmp_path):
    source = save(tiny("gemma2"), tmp_path / "gemma2")
    prompt = np.array([[5, 17, 30, 44, 8, 61, 72, 19, 3, 88, 12]])
    generated = []
    for target in ("onnxruntime", "portable"):
        options = ("--norm", "softmax", "--cache", "contiguous", "--target", target)
        result = sharp_export(source, *options, "-o", tmp_path / target)
        assert result.exit_code == 0, result.output
        generated.append(ContiguousSession(tmp_path / target, kernels=False).generate(prompt, 8).tolist())
    assert generated[0] == generated[1]


def test_the_server_does_not_update_its_cache_in_place(checkpoint, sharp_export, tmp_path):
    sharp_export(checkpoint("ssa"), "--norm", "ssa", "--target", "portable", "-o", tmp_path / "out")
    loaded = OnnxRuntimeBackend.load(tmp_path / "out", read_manifest(tmp_path / "out"), BackendConfig())
    assert not loaded.kernels  # only the kernels can update a cache in place
