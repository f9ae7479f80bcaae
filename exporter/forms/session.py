"""Sessions of ONNX Runtime that run a model folder."""

from pathlib import Path

import onnxruntime

from sharp.exporter.graph.lowering import DATA_FILE, MODEL_FILE
from sharp.exporter.verification.parked_weights import LEAST_BYTES
from sharp.plugins.cuda.kernel_library import register_kernels


def open_session(folder: Path, *, kernels: bool, threads: int = 0) -> onnxruntime.InferenceSession:
    """Open the model in `folder` on the CPU, with `threads` threads (0: all).

    With `kernels` the attention runs in Sharp's library; without, ONNX Runtime inlines the function body. ONNX Runtime
    raises its own errors for a model that is missing or that it cannot load.

    Raises:
        SharpError: `kernels` is set, and Sharp's library is not built.
        InputError: `kernels` is set, and the environment variable SHARP_ISA names no instruction set of the processor.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    data = folder / DATA_FILE
    if data.exists() and data.stat().st_size >= LEAST_BYTES:
        # ONNX Runtime maps the weights from their file. Packing them for matrix products would make a second copy.
        options.add_session_config_entry("session.disable_prepacking", "1")
    if kernels:
        register_kernels(options)
    return onnxruntime.InferenceSession(folder / MODEL_FILE, options, ["CPUExecutionProvider"])
