"""A replica on an emulated GPU, which only waits, is bound to the device that Ray shows, and can be lost."""

import os
from pathlib import Path

import numpy as np

from bench.emulated_device import EmulatedDevice
from sharp.ray.replica import ModelServer
from sharp.serving.api.errors import DeviceLostError, InputError
from sharp.serving.config import BACKENDS
from tests.full.ray.slow_server import FOLDER, announce
from tests.serving.conftest import EOS

STEP_SECONDS = 0.05
ROWS = 64
MEMORY = 1 << 24  # bytes of the device


class EmulatedGpu(EmulatedDevice):
    """The only visible GPU. A file named by its number, beside the replicas' folder, means that the GPU is lost."""

    device = "cuda"

    @classmethod
    def load(cls, folder, manifest, config):
        if config.device != "cuda" or not visible().isdigit():
            raise InputError(f"device is {config.device} and the visible GPUs are {visible()!r}; one is needed")
        device = cls(manifest, STEP_SECONDS, ROWS)
        device._logits[:, EOS] = -np.inf  # every stream has its full length
        return device

    def free_memory(self, largest):
        return MEMORY

    def step(self, batch):
        if (lost := lost_file(visible())).exists():
            lost.unlink()  # the next process finds the GPU in order
            raise DeviceLostError("the GPU is lost")
        return super().step(batch)


def visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def lost_file(gpu):
    return Path(os.environ[FOLDER]).parent / f"lost-{gpu}"


class GpuServer(ModelServer.func_or_class):
    async def __init__(self, *arguments, **options):
        BACKENDS["onnxruntime"] = f"{__name__}:EmulatedGpu"
        await super().__init__(*arguments, **options)
        announce(self, gpu=visible())
