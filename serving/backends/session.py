"""ONNX Runtime sessions, opened on the device that the settings name."""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from sharp.core.manifest import Manifest
from sharp.plugins.cpu.page_memory import into_huge_pages
from sharp.plugins.cuda.kernel_library import register_kernels
from sharp.plugins.cuda.model_package import add_kernels_for_gpu
from sharp.serving.api.errors import InputError, SharpError
from sharp.serving.backends.cuda_provider import check_session, choose_device, provider_options
from sharp.serving.backends.weights import chosen_weights, copied_model
from sharp.serving.config import BackendConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedModel:
    """An open session of a model.

    Attributes:
        session: the `InferenceSession`.
        device: the device that computes, "cpu" or "cuda".
        kernels: attention runs Sharp's kernels.
        captures: decode steps are captured as CUDA graphs.
    """

    session: Any
    device: str
    kernels: bool
    captures: bool


def open_model(folder: Path, manifest: Manifest, config: BackendConfig) -> OpenedModel:
    """Open the model of a folder.

    Raises:
        InputError: ONNX Runtime cannot load the file, or the device cannot be used.
    """
    with_kernels = config.kernels and manifest.target != "portable"
    device = choose_device(config.device, with_kernels, config.gpu)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = config.threads
    options.inter_op_num_threads = 1
    # ONNX Runtime keeps a memory plan for every input shape, and batches of whole texts have thousands of shapes.
    options.enable_mem_pattern = manifest.cache.form == "paged"
    if manifest.cache.form == "none":
        # ONNX Runtime warns of an input that has a default value, which `collect_stats` has on purpose.
        options.log_severity_level = 3
    library = kernel_library() if with_kernels else None
    captures = config.cuda_graphs and device == "cuda" and library is not None
    if library is not None:
        register_kernels(options, library)
    path = folder / manifest.model_file
    if manifest.dtype == "bfloat16" and device == "cpu":
        raise InputError(
            f"{path} computes in bfloat16, which ONNX Runtime does not do on a CPU; export the model again with "
            "--dtype float16, or with float32 and --kv-dtype bfloat16"
        )
    if library is None and manifest.target == "tensorrt":
        raise InputError(
            f"{path} was exported with --target tensorrt and needs Sharp's kernels; "
            "install or enable them, or export the model again with --target onnxruntime"
        )
    if library is None and manifest.cache.beside:
        raise InputError(
            f"{path} has an {manifest.cache.dtype} cache, which needs Sharp's kernels; "
            "install or enable them, or export the model again with another --kv-dtype"
        )
    try:
        on_device = provider_options(config.gpu, cuda_graphs=captures)
        providers = [on_device] if device == "cuda" else ["CPUExecutionProvider"]
        with into_huge_pages() if device == "cpu" else contextlib.nullcontext():
            model: str | bytes = str(path)
            # A GPU always has a copy of its own.
            if device == "cpu" and chosen_weights(folder, manifest, config.weights) == "copy":
                copied = copied_model(folder, manifest, verify=config.verify_files)
                model = copied.model
                copied.add_to(options)
            session = onnxruntime.InferenceSession(model, options, providers=providers)
    except InputError:
        raise
    except Exception as error:  # ONNX Runtime has no common exception
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path} cannot be loaded: {reason}; export the model again") from error
    if device == "cuda":
        check_session(session)
        if library is not None:
            add_kernels_for_gpu(folder, config.gpu)
    return OpenedModel(session, device, library is not None, captures)


def kernel_library() -> Path | None:
    """Return the path of Sharp's kernels for ONNX Runtime. If they are not installed, log a warning and return None.

    Raises:
        InputError: SHARP_LIBRARY_FOLDER is not a folder.
    """
    try:
        from sharp.plugins import library_path

        return Path(library_path("onnxruntime"))
    except InputError:
        raise
    except (ImportError, SharpError) as error:
        logger.warning("attention runs as standard ops, many times slower (a small --cache-tokens helps): %s", error)
        return None
