"""The registration of Sharp's kernels in a session of ONNX Runtime."""

from pathlib import Path
from typing import Any

from sharp.core.errors import InputError
from sharp.plugins import library_path


def register_kernels(options: Any, library: str | Path | None = None) -> None:
    """Register Sharp's ops with the options (`SessionOptions`) of an ONNX Runtime session, before the session is made.

    `library` is the path of a library; None is the installed one.

    Raises:
        SharpError: the library is not built.
        InputError: the file is missing or not a library of Sharp, SHARP_LIBRARY_FOLDER is no folder, or SHARP_ISA names
            no instruction set of this processor.
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
