"""Libraries whose pins conflict with ours are in `build/foreign` (`make foreign`), without what they depend on."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "build" / "foreign"


@pytest.fixture(scope="package", autouse=True)
def foreign_libraries() -> Iterator[None]:
    """Behind everything that is installed. torchvision's wheel is for CUDA: timm imports it and calls nothing of it."""
    if not FOLDER.is_dir():
        yield
        return
    sys.path.append(str(FOLDER))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if torch.version.cuda is None:  # or torchvision brings them itself
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
