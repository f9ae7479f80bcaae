"""The compiler of Triton kernels to machine code, which does not need a GPU."""

import builtins
import hashlib
import inspect
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sharp.core.errors import InputError, SharpError

# Bytes of shared memory that a block may have, by compute capability (CUDA programming guide, table of compute
# capabilities).
MOST_SHARED = {
    **dict.fromkeys((80, 87), 163 << 10),
    **dict.fromkeys((86, 89, 120, 121), 99 << 10),
    **dict.fromkeys((90, 100, 103, 110), 227 << 10),
}
CAPABILITIES = tuple(sorted(MOST_SHARED))  # what kernels are compiled for
# Machine code for these capabilities runs on later ones of the same major version, too: that of 100 on 103 (B300), that
# of 120 on 121 (GB10). NVIDIA calls such targets sm_100f and sm_120f; Triton writes for sm_100a and sm_120a only.
FAMILIES = (100, 120)
# What `make kernels` compiles for by default. 87 and 89 run code for 86, and 103 and 121 that of their families; 110
# runs none of it.
TARGETS = (80, 86, 90, 100, 120)
# The driver translates PTX for every other GPU from Ampere on. PTX for sm_80 is used, because what Triton writes for
# sm_90 and above runs on that GPU only. Every driver that knows a GPU newer than ours reads PTX version 8.5.
PTX_CAPABILITY, PTX_VERSION = 80, 85
POINTER_ALIGNMENT = 16  # bytes; torch, ONNX Runtime and TensorRT align tensors to more


@dataclass(frozen=True)
class SpecializedKernel:
    """A Triton function with everything that is fixed at compile time.

    `arguments` are the function's run-time parameters in order, with Triton's types ("*fp16", "i32", "fp32"). Pointers
    are assumed to be aligned to 16 bytes. `tile` is the number of rows and keys in a tile, which determines grids and
    scratch memory.
    """

    name: str
    function: Any  # triton.JITFunction
    arguments: Mapping[str, str]
    constants: Mapping[str, object]
    warps: int = 4
    stages: int = 2
    tile: tuple[int, int] = (0, 0)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the function's module and name, because Triton's functions cannot be pickled."""
        return {**vars(self), "function": (self.function.__module__, self.function.__name__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and import the function by its module and name."""
        module, name = state["function"]
        vars(self).update(state, function=getattr(import_module(module), name))


@dataclass(frozen=True)
class Image:
    """A compiled kernel: `content` is a cubin for one capability, or PTX if `ptx`, with the function `entry`.

    `exact` is whether only a GPU of exactly this capability loads it (sm_90a and the like). `arguments` are pairs of
    name and type in order. `hidden` are the arguments that Triton adds at the end; all are pointers that may be null. A
    block has `threads` threads and `shared_bytes` of shared memory. `seconds` is the time of compilation, None if the
    kernel was in the cache. `tile` is the kernel's.
    """

    kernel: str
    entry: str
    capability: int
    ptx: bool
    exact: bool
    content: bytes
    shared_bytes: int
    threads: int
    arguments: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    tile: tuple[int, int]
    seconds: float | None

    @property
    def target(self) -> str:
        """The name of the target in NVIDIA's tools: sm_90a, sm_100f, or compute_80 for PTX."""
        return f"compute_{self.capability}" if self.ptx else _target(self.capability)


_PTX_TYPES = {"i32": "u32", "i64": "u64", "fp32": "f32"}
HIDDEN_ARGUMENTS = ("global_scratch", "profile_scratch")


def compile_kernel(kernel: SpecializedKernel, capability: int | None, cache: Path) -> Image:
    """Compile a kernel for a compute capability of `CAPABILITIES` (90 is 9.0), or to PTX for None.

    The folder `cache` keeps compiled kernels with their PTX, by a hash of source, options and Triton's version; it is
    made if needed.
    Settings of Triton are changed for the whole process, so compile in one thread only.

    Raises:
        InputError: the kernel needs something that the launcher does not provide, or too much shared memory.
        SharpError: Triton or NVIDIA's assembler refused the kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    ptx = capability is None
    folder = cache / _constants_digest(kernel)
    triton.knobs.cache.dir = str(folder)
    triton.knobs.cache.store_binary_only = False  # the PTX is read below
    # Line tables are left out, because they would name this machine's folders in every image.
    triton.knobs.compilation.disable_line_info = True
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": True}
    if ptx:
        options["ptx_version"] = PTX_VERSION
    hits = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    began = time.monotonic()
    try:
        compiled = triton.compile(
            ASTSource(
                fn=kernel.function,
                signature=_signature(kernel),
                constexprs=dict(kernel.constants),
                attrs=_attributes(kernel),
            ),
            target=GPUTarget("cuda", capability or PTX_CAPABILITY, 32),
            options=options,
        )
    except TritonError as error:
        raise SharpError(f"kernel {kernel.name} does not compile for {capability or 'PTX'}: {error}") from error
    finally:
        triton.knobs.compilation.listener = None
    metadata = compiled.metadata
    for need in ("global_scratch_size", "profile_scratch_size", "tensordesc_meta", "launch_cooperative_grid"):
        if getattr(metadata, need, None):
            raise InputError(
                f"kernel {kernel.name} has {need} = {getattr(metadata, need)}; the launcher has no such thing"
            )
    if metadata.num_ctas != 1 or getattr(metadata, "launch_pdl", False):
        raise InputError(f"kernel {kernel.name} needs clusters or dependent launches, which the launcher has not")
    # PTX is for unknown GPUs, so it may use only the shared memory that all known GPUs have.
    most = MOST_SHARED[capability] if capability else min(MOST_SHARED.values())
    if metadata.shared > most:
        raise InputError(
            f"kernel {kernel.name} needs {metadata.shared} bytes of shared memory, but compute capability "
            f"{capability or 'of PTX'} has {most} a block; give it smaller tiles or fewer stages"
        )
    _check_parameters(kernel, compiled.asm["ptx"])
    if ptx:
        content = compiled.asm["ptx"].encode() + b"\0"
    elif capability in FAMILIES:
        content = _family_code(kernel, capability, compiled.asm["ptx"], folder / f"{compiled.hash}.cubin")
    else:
        content = compiled.asm["cubin"]
    return Image(
        kernel=kernel.name,
        entry=metadata.name,
        capability=capability or PTX_CAPABILITY,
        ptx=ptx,
        exact=not ptx and _target(capability or 0).endswith("a"),
        content=content,
        shared_bytes=metadata.shared,
        threads=metadata.num_warps * metadata.warp_size,
        arguments=tuple(kernel.arguments.items()),
        hidden=HIDDEN_ARGUMENTS,
        tile=kernel.tile,
        seconds=None if hits == [True] else time.monotonic() - began,
    )


def _target(capability: int) -> str:
    """Return the name of a target in NVIDIA's tools: sm_80, sm_90a, sm_100f."""
    return f"sm_{capability}{'f' if capability in FAMILIES else 'a' if capability >= 90 else ''}"


def _family_code(kernel: SpecializedKernel, capability: int, ptx: str, path: Path) -> bytes:
    """Return the machine code for all GPUs of a family, from Triton's PTX for its first GPU; `path` keeps the code.

    Raises:
        SharpError: NVIDIA's assembler refused the PTX, because the family lacks what it uses.
    """
    from triton import knobs

    if not path.is_file():
        target = _target(capability)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(re.sub(r"\.target sm_\w+", f".target {target}", ptx))
            # the options of Triton's own call
            options = ("-lineinfo", "-suppress-debug-info", "--regAllocOptLevel=2", f"--gpu-name={target}")
            command = [knobs.nvidia.ptxas_blackwell.path, *options, str(source), "-o", str(made)]
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            if finished.returncode != 0:
                raise SharpError(f"kernel {kernel.name} does not assemble for {target}: {finished.stderr.strip()}")
            made.replace(path)
    return path.read_bytes()


def _constants_digest(kernel: SpecializedKernel) -> str:
    """Return a hash of the modules that define the classes of the constants.

    Triton's own hash covers a kernel's code and the functions that it calls, but not these classes.
    """
    modules = {inspect.getmodule(type(value)) for value in kernel.constants.values()}
    sources = sorted(inspect.getsource(module) for module in modules if module and module is not builtins)
    return hashlib.sha256("".join(sources).encode()).hexdigest()[:16]


def _signature(kernel: SpecializedKernel) -> dict[str, str]:
    """Return Triton's types by parameter, in the function's order.

    Raises:
        InputError: a parameter of the function is neither an argument nor a constant, or both.
    """
    names = kernel.function.arg_names
    unknown = sorted({*kernel.arguments, *kernel.constants} ^ set(names))
    if unknown or set(kernel.arguments) & set(kernel.constants):
        raise InputError(f"kernel {kernel.name}: every parameter must be an argument or a constant; see {unknown}")
    return {name: kernel.arguments.get(name, "constexpr") for name in names}


def _check_parameters(kernel: SpecializedKernel, ptx: str) -> None:
    """Check that the PTX declares the kernel's arguments and `HIDDEN_ARGUMENTS`, and no others, in order.

    Triton drops constants and adds hidden arguments; signed and untyped types count as equal.

    Raises:
        InputError: types or number differ.
    """
    # If a version of Triton hid other arguments than these, its kernels would read parameters that nobody passed.
    declared = re.findall(r"\.param \.(\w+)", ptx[: ptx.index("\n)")])
    expected = [_PTX_TYPES.get(type_, "u64") for type_ in kernel.arguments.values()] + ["u64"] * len(HIDDEN_ARGUMENTS)
    if [kind.replace("b", "u") for kind in declared] != [kind.replace("b", "u") for kind in expected]:
        raise InputError(f"kernel {kernel.name} has the parameters {declared} in PTX, but should have {expected}")


def _attributes(kernel: SpecializedKernel) -> dict[tuple[int], list[list[object]]]:
    """Return Triton's attributes by argument index, as its compiler takes them: pointers are aligned."""
    aligned = [["tt.divisibility", POINTER_ALIGNMENT]]
    return {
        (index,): aligned
        for index, name in enumerate(kernel.function.arg_names)
        if kernel.arguments.get(name, "").startswith("*")
    }
