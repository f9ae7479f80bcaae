"""Small Triton kernels for tests of the code that compiles and packs kernels."""

from dataclasses import dataclass

import triton
import triton.language as tl

from sharp.plugins.cuda.compiler import SpecializedKernel


@dataclass(frozen=True)
class Options:
    block: int

    @property
    def half(self):
        return self.block // 2


@triton.jit
def scaled(values, factor):
    return values * factor


@triton.jit
def scale(x, y, count, factor, OPTIONS: tl.constexpr):
    places = tl.program_id(0) * OPTIONS.block + tl.arange(0, OPTIONS.block)
    tl.store(y + places, scaled(tl.load(x + places, mask=places < count), factor), mask=places < count)


@triton.jit
def product(x, y, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(x + places)
    tl.store(y + places, tl.dot(values, values))


@triton.jit
def odd(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 0.0)


SCALE_ARGUMENTS = {"x": "*fp16", "y": "*fp16", "count": "i32", "factor": "fp32"}


def scale_kernel(name="scale", block=128, **options):
    return SpecializedKernel(name, scale, SCALE_ARGUMENTS, {"OPTIONS": Options(block)}, **options)


def odd_kernel():
    return SpecializedKernel("odd", odd, {"x": "*fp32"}, {"SIZE": 3})


def product_kernel(size):
    return SpecializedKernel(f"product{size}", product, {"x": "*fp16", "y": "*fp16"}, {"SIZE": size})
