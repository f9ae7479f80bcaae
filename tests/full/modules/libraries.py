"""Libraries whose pins conflict with ours are in `build/foreign` (`make foreign`), without what they depend on."""

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
    """Behind everything that is installed. timm imports torchvision, whose wheel is for CUDA, and torchtune imports
    datasets, which is not there; neither calls anything of it."""
    if not FOLDER.is_dir():
        yield
        return
    sys.path.append(str(FOLDER))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if torch.version.cuda is None:  # or torchvision brings them itself
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    absent = ("datasets", "datasets.distributed") if importlib.util.find_spec("datasets") is None else ()
    sys.modules.update({name: MagicMock() for name in absent})
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in absent:
            del sys.modules[name]
