"""Run the conformance data of Sharp's ops in any ONNX Runtime: `python run_data.py [FOLDER] [--library PATH]`.

The script needs onnx, numpy and onnxruntime, and nothing of Sharp: without a library of kernels, ONNX Runtime inlines
the function bodies that the models carry. FOLDER has a folder per test, in the form of ONNX's backend tests. Outputs
must agree with the reference to 1e-5 of the largest value, caches exactly, and statistics to 5e-5.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

EXACT = ("key_cache_out", "value_cache_out", "present_key", "present_value")
SUPPORT = 1  # the column of the support, where a key within a rounding error of entmax's threshold may be in or out


def run(test: Path, library: str | None = None) -> None:
    """Run the test of one folder; raise an AssertionError that says what differs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(test / "model.onnx", options, providers=["CPUExecutionProvider"])
    inputs, outputs = (_tensors(test / "test_data_set_0", kind) for kind in ("input", "output"))
    results = dict(zip(outputs, session.run(list(outputs), inputs), strict=True))
    for name, expected in outputs.items():
        result = results[name]
        if name in EXACT:
            np.testing.assert_array_equal(result, expected, err_msg=name)
        elif name == "stats":
            np.testing.assert_allclose(result[..., SUPPORT], expected[..., SUPPORT], rtol=0, atol=1, err_msg=name)
            others = [column for column in range(4) if column != SUPPORT]
            np.testing.assert_allclose(result[..., others], expected[..., others], rtol=5e-5, atol=5e-5, err_msg=name)
        else:
            largest = np.abs(expected).max(initial=1e-3)
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * largest, err_msg=name)


def _tensors(folder: Path, kind: str) -> dict[str, np.ndarray]:
    found = sorted(folder.glob(f"{kind}_*.pb"), key=lambda path: int(path.stem.rpartition("_")[2]))
    tensors = [onnx.TensorProto.FromString(path.read_bytes()) for path in found]
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}


def main() -> int:
    """Run all tests, print a line for each, and return 1 if a test fails, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--library", help="a custom-op library with kernels for the domain ai.sharp")
    arguments = parser.parse_args()
    tests = sorted(path.parent for path in arguments.folder.glob("*/model.onnx"))
    failed = 0
    for test in tests:
        try:
            run(test, arguments.library)
            print(f"passed  {test.name}")
        except Exception as error:
            failed += 1
            print(f"FAILED  {test.name}: {error}")
    print(f"{len(tests) - failed} passed, {failed} failed")
    return int(failed > 0 or not tests)


if __name__ == "__main__":
    sys.exit(main())
