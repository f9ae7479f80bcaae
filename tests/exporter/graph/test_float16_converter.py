"""ONNX Runtime's float16 converter works on exported models, used as docs/compatibility.md says."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

from sharp.plugins.cuda.kernel_library import register_kernels
from tests.marks import full


@pytest.mark.parametrize("target", ["onnxruntime", full("portable")])
def test_a_converted_model_writes_the_same_tokens(checkpoint, sharp_export, tmp_path, target):
    path, folder = checkpoint("entmax"), tmp_path / "out"
    result = sharp_export(path, "--norm", "entmax", "--cache", "none", "--target", target, "-o", folder)
    assert result.exit_code == 0, result.output
    model = convert_float_to_float16(
        onnx.load(folder / "model.onnx"),
        keep_io_types=True,
        disable_shape_infer=True,
        op_block_list=[*DEFAULT_OP_BLOCK_LIST, "SharpAttention"],
    )
    onnx.save(model, tmp_path / "half.onnx")
    assert any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer)
    ids = {"input_ids": np.array([[5, 17, 30, 44, 8, 100, 101]])}
    (expected,) = onnxruntime.InferenceSession(folder / "model.onnx").run(["logits"], ids)
    for kernels in (False, True) if target == "onnxruntime" else (False,):
        options = onnxruntime.SessionOptions()
        if kernels:
            register_kernels(options)
        (logits,) = onnxruntime.InferenceSession(tmp_path / "half.onnx", options).run(["logits"], ids)
        np.testing.assert_allclose(logits, expected, atol=0.01 * np.abs(expected).max())
        assert (logits.argmax(-1) == expected.argmax(-1)).all()
