"""The published conformance data agrees with the reference, and can be run without any code of Sharp."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from sharp.plugins import library_path
from tests.plugins.conformance import run_data
from tests.plugins.conformance.write_data import DATA, data


def test_the_data_is_current() -> None:
    written = {path.parent.name for path in DATA.glob("*/model.onnx")}
    hint = "run: python -m tests.plugins.conformance.write_data"
    assert written == {name for name, *_ in data()}, hint
    for name, model, inputs, outputs in data():
        assert onnx.load(DATA / name / "model.onnx") == model, f"{name}: {hint}"
        tensors = DATA / name / "test_data_set_0"
        for kind, arrays in (("input", inputs), ("output", outputs)):
            for index, array in enumerate(arrays):
                stored = onnx.TensorProto.FromString((tensors / f"{kind}_{index}.pb").read_bytes())
                np.testing.assert_allclose(numpy_helper.to_array(stored), array, rtol=1e-6, err_msg=f"{name}: {hint}")


@pytest.mark.full
def test_it_runs_without_our_code() -> None:
    # Option -I hides this folder and PYTHONPATH. Option -S would also hide onnx.
    blocked = (
        "import runpy, sys; sys.modules['sharp'] = None; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-c", blocked, run_data.__file__],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].endswith(" passed, 0 failed")


def test_our_kernels_pass_it() -> None:
    for test in sorted(path.parent for path in DATA.glob("*/model.onnx")):
        run_data.run(test, library_path("onnxruntime"))


@pytest.mark.parametrize("name", ["attention_softmax", "attention_ssa", "paged_attention_entmax"])
def test_onnx_reads_it(name: str) -> None:
    """ONNX's checker accepts the data with strict shape inference, and ONNX's reference evaluator runs it."""
    model = onnx.load(DATA / name / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    tensors = [run_data._tensors(DATA / name / "test_data_set_0", kind) for kind in ("input", "output")]
    result = ReferenceEvaluator(model).run(["output"], tensors[0])[0]
    np.testing.assert_allclose(result, tensors[1]["output"], rtol=1e-4, atol=1e-5)
