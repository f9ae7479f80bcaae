"""Libraries with pins that conflict with Sharp's, in `build/foreign` (`make foreign`), without their dependencies."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import torch

FOLDER = Path(__file__).parents[3] / "build" / "foreign"


@contextmanager
def foreign_libraries() -> Iterator[None]:
    """Make the foreign libraries importable, after all installed packages.

    timm imports torchvision, whose wheel is for CUDA, and torchtune imports datasets, which is not installed. Neither
    calls a function of them, so stand-ins suffice.
    """
    if not FOLDER.is_dir():
        yield
        return
    sys.path.append(str(FOLDER))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if torch.version.cuda is None:  # with CUDA torchvision defines the operators itself
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    absent = ("datasets", "datasets.distributed") if importlib.util.find_spec("datasets") is None else ()
    sys.modules.update({name: MagicMock() for name in absent})
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in absent:
            del sys.modules[name]
