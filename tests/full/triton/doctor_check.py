"""`sharp doctor` with Triton, in the interpreter's process, where tensors of the GPU are tensors of the CPU."""

from typing import Any


def check() -> dict[str, Any]:
    """Return the diagnosis of Triton's backend."""
    from dataclasses import asdict, replace

    import torch

    from sharp.plugins.doctor import case
    from sharp.plugins.doctor.backends import backends
    from sharp.plugins.doctor.diagnosis import diagnose

    torch.Tensor.cuda = lambda tensor: tensor
    case.SEQUENCES = ((40, 1), (0, 3))  # small, because the interpreter is slow
    [triton] = [backend for backend in backends() if backend.name == "Triton under PyTorch"]
    return asdict(diagnose(replace(triton, ready=lambda: None, dtypes=("float32", "int8", "fp8"))))
