"""Sharp's kernels in a session of ONNX Runtime."""

from pathlib import Path
from typing import Any

from sharp.plugins import library_path
from sharp.plugins.errors import InputError


def register_kernels(options: Any, library: str | Path | None = None) -> None:
    """Give `options`, of a session of ONNX Runtime, Sharp's ops, from the installed library or another one.

    Raises:
        SharpError: the library is not built.
        InputError: the file is no library of Sharp's, or SHARP_ISA names no instruction set of this processor.
    """
    path = library_path("onnxruntime") if library is None else str(library)
    try:
        options.register_custom_ops_library(path)
    except Exception as error:  # ONNX Runtime has no common exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "SHARP_ISA" in reason:
            raise InputError(reason[reason.index("SHARP_ISA") :]) from error
        raise InputError(
            f"{path} cannot be used as Sharp's kernel library: {reason}; unset SHARP_LIBRARY_FOLDER, or install Sharp "
            "again"
        ) from error
