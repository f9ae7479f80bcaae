"""Triton's compiler on all processors before kernels are timed, because one after another they would take minutes."""

import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from bench.gpu.inputs import Call
from sharp.plugins.triton.launching import type_name
from sharp.plugins.triton.options import Options, power_name
from sharp.plugins.triton.tiles import Tile
from sharp.plugins.triton.variants import Kernel, compile_kernel, kernels

SHARE = 0.5  # of a section's time, at most; a case compiles those of its kernels that are missing then


@dataclass(frozen=True)
class Job:
    """The launches of a phase with these options, or with this tile instead of the phase's own."""

    options: Options
    phase: Literal["decode", "prefill"]
    tile: Tile | None = None

    def kernels(self, capability: int) -> list[Kernel]:
        """Return the phase's kernels for a compute capability (90 is 9.0), each once, however often it is launched."""
        found = kernels(self.options, capability, **{f"{self.phase}_as": self.tile})
        of_prompts = self.phase == "prefill"
        named = {
            (kernel.name, kernel.constants["OPTIONS"]): kernel
            for kernel in found
            if kernel.name.startswith("write") or ("prefill" in kernel.name or "prompts" in kernel.name) == of_prompts
        }
        return list(named.values())


def options_of(call: Call) -> Options:
    """Return the compile-time options of a call of PagedAttention."""
    tensors = call.tensors
    return Options(
        call.normalizer,
        type_name(tensors["query"]),
        type_name(tensors["key_cache"]),
        tensors["query"].shape[2],
        tensors["value"].shape[2],
        tensors["key_cache"].shape[3],
        "collect_stats" in tensors,
        "alibi_slopes" in tensors,
        call.attributes.get("softcap", 0.0) > 0,
        power=power_name(call.attributes.get("alpha", 1.5)) if call.normalizer == "entmax" else "",
        screened="key_screen" in tensors,
    )


def capability() -> int:
    """Return the GPU's compute capability; 90 is 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def processes() -> ProcessPoolExecutor:
    """Return an executor with as many processes as there are processors, but for one."""
    return ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), multiprocessing.get_context("spawn"))


def compile_number(options: Options, number: int, capability: int) -> None:
    """Compile one of a call's kernels into Triton's cache on the disk, from where the calls then take it.

    `number` is the kernel's index in `kernels(options, capability)`, and `capability` the GPU's, such as 90.
    """
    compile_kernel(kernels(options, capability)[number], capability)


class Compilations:
    """The kernels of whole calls, compiled in an executor's processes, with all kernels of a call at the same time."""

    def __init__(self, executor: Executor, capability: int) -> None:
        """Take the executor; nothing is compiled yet."""
        self._executor, self._capability = executor, capability
        self._begun: dict[Options, list[Future[None]]] = {}

    def begin(self, options: Options) -> None:
        """Begin to compile the kernels of calls with these options, unless that was begun before; do not wait."""
        if options not in self._begun:
            numbers = range(len(kernels(options, self._capability)))
            with suppress(BrokenExecutor):  # the compiler crashed; the case will compile its kernels
                self._begun[options] = [
                    self._executor.submit(compile_number, options, number, self._capability) for number in numbers
                ]

    def finish(self, options: Options) -> None:
        """Wait until the kernels of these options are compiled; do nothing if they were not begun.

        An error of the compiler is raised, and so belongs to the case. A crash of its process is ignored, because the
        case will compile its kernels.
        """
        with suppress(BrokenExecutor):
            for future in self._begun.get(options, ()):
                future.result()


def compile_one(job: Job, number: int, capability: int) -> None:
    """Compile kernel number `number` of a job into Triton's cache, for a GPU of this compute capability, such as 90."""
    compile_kernel(job.kernels(capability)[number], capability)


def compile_ahead(jobs: Iterable[Job], minutes: float) -> None:
    """Compile the kernels that the jobs of a section of `minutes` launch, for the GPU of this machine.

    This takes at most half of the minutes. A kernel that is not ready then, or that cannot be compiled, is left to the
    case that launches it, which reports the error.
    """
    began, target = time.monotonic(), capability()
    executor = processes()
    work = [(job, number) for job in jobs for number in range(len(job.kernels(target)))]
    work.sort(key=lambda item: item[0].phase != "prefill")  # prefill kernels take longest, so they come first
    done, left = wait([executor.submit(compile_one, *item, target) for item in work], timeout=60 * SHARE * minutes)
    executor.shutdown(wait=False, cancel_futures=True)
    failed = sum(future.exception() is not None for future in done)
    said = f", {failed} failed" * (failed > 0) + f", {len(left)} not in time" * (len(left) > 0)
    print(f"  {len(work)} kernels compiled in {time.monotonic() - began:.0f} s{said}", flush=True)
