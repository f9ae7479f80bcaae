"""TensorRT-RTX reads exported models: its parser inlines the function body, and an engine builds without a GPU."""

import onnx
import pytest

from tests.tensorrt_rtx import build_engine


@pytest.mark.parametrize(("norm", "positions"), [("softmax", "rope"), ("ssa", "nape"), ("asentmax", "nape")])
def test_engine_builds_from_an_exported_model(checkpoint, sharp_export, tmp_path, norm, positions):
    result = sharp_export(checkpoint(norm, positions), "--norm", norm, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    path = tmp_path / "out" / "model.onnx"
    assert build_engine(onnx.load(path, load_external_data=False), path).nbytes > 0
