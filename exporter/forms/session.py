"""A model folder in ONNX Runtime."""

from pathlib import Path

import onnxruntime

from sharp.exporter.graph.lowering import DATA_FILE, MODEL_FILE
from sharp.exporter.verification.parked_weights import LEAST_BYTES
from sharp.plugins.kernel_library import register_kernels


def open_session(folder: Path, *, kernels: bool, threads: int = 0) -> onnxruntime.InferenceSession:
    """The model of `folder` on the CPU, on so many threads (0: all).

    With `kernels` the attention runs in Sharp's library; without, ONNX Runtime inlines the function body.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    data = folder / DATA_FILE
    if data.exists() and data.stat().st_size >= LEAST_BYTES:
        # ONNX Runtime maps the weights from their file; packed for its matrix products they are a second copy.
        options.add_session_config_entry("session.disable_prepacking", "1")
    if kernels:
        register_kernels(options)
    return onnxruntime.InferenceSession(folder / MODEL_FILE, options, ["CPUExecutionProvider"])
