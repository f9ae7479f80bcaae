"""Functions that run in the process of Triton's interpreter, with numpy arrays as arguments and results."""

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sharp.plugins.cpu.sampling import Changes
from sharp.plugins.op.schema import SCALES
from tests.full.triton.memory_check import MemoryCheck, place_of
from tests.plugins.conformance import attention_cases
from tests.plugins.conformance.cases import Case

DATA = ("query", "key", "value")
CACHES = ("key_cache", "value_cache")
PASTS = ("past_key", "past_value")
Run = Callable[..., Any]
RESULTS = ("output", "key_cache", "value_cache", "stats")
MEMORY = MemoryCheck()


def start() -> None:
    """Set up this process before Triton or torch is imported.

    Triton decides on interpretation when it is imported, and torch may import it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    # The interpreter computes numbers that a mask then drops, and numpy warns of NaN among them.
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    # New tensors hold NaN, so that a kernel shows when it reads or returns a number that it has not written.
    torch.empty = _poisoned(torch.empty)  # type: ignore[assignment]
    torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)  # type: ignore[assignment]
    _widen_bfloat16()
    _drop_nan()
    _patch_once()
    _find_types_once()
    _make_shapes_once()
    _leave_integers_unchecked()
    from sharp.plugins.triton import launching

    MEMORY.install()
    launching.launch = MEMORY.around(launching.launch)


def _widen_bfloat16() -> None:
    """Let Triton 3.7's interpreter multiply bfloat16 numbers in tl.dot, instead of their bits.

    It also truncates to bfloat16, where a GPU rounds to the nearest.
    """
    import ml_dtypes
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    truncate = InterpreterBuilder.create_fp_trunc

    def create_fp_trunc(self: Any, numbers: Any, to: Any) -> Any:
        if numbers.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return truncate(self, numbers, to)
        return TensorHandle(numbers.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)

    InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc = create_dot, create_fp_trunc


def _drop_nan() -> None:
    """Let minimum and maximum drop NaN, as on a GPU; Triton 3.7's interpreter returns NaN."""
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)


def _patch_once() -> None:
    """Let Triton 3.7's interpreter patch `triton.language` once, instead of at each call in 40 % of its time.

    The patch can stay, because this process compiles nothing.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # by names of the language's modules, because Triton's own functions use other names
    patched: set[frozenset[str]] = set()

    def patch_once(function: Any) -> Any:
        modules = frozenset({"tl", "core"} & function.__globals__.keys())
        if modules not in patched:
            patch(function)
            patched.add(modules)
        return interpreter._LangPatchScope()  # a scope that restores nothing

    interpreter._patch_lang = patch_once


def _find_types_once() -> None:
    """Let Triton 3.7's interpreter keep the types that it finds.

    Otherwise it makes a table of all types for each, in a tenth of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    find = interpreter._get_np_dtype
    found: dict[str, np.dtype] = {}

    def find_once(kind: Any) -> np.dtype:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = find_once


def _make_shapes_once() -> None:
    """Let Triton's language share one checked shape among all tensors and types of that shape."""
    import triton.language as tl

    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[int, ...], tuple[Any, int]] = {}
    make_block = tl.block_type.__init__

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        shape = (*kind.shape.values,) if kind.is_block() else ()  # as Python's tuple, instead of Triton's
        if shape not in tensors:
            tensors[shape] = tl.constexpr(math.prod(shape)), tl.core.tuple(map(tl.constexpr, shape))
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = tensors[shape]

    def block(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if sizes not in blocks:
            make_block(self, element, shape)
            blocks[sizes] = self.shape, self.numel
        self.element_ty = element
        self.shape, self.numel = blocks[sizes]

    tl.tensor.__init__, tl.block_type.__init__ = tensor, block
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)


def _leave_integers_unchecked() -> None:
    """Leave out the checks of Triton 3.7's interpreter for overflows of integers, which take a third of its time."""
    from triton.language.semantic import TritonSemantic

    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned(*arguments: Any, **options: Any) -> Any:
        tensor = allocate(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return poisoned


def run_steps(case: Case, most_steps: int) -> dict[str, np.ndarray]:
    """Run op PagedAttention with at most `most_steps` passes of entmax's search over the logits."""
    import triton.language as tl

    from sharp.plugins.triton import prefill, solve

    before = solve.MOST_STEPS
    # a kernel reads the name in its own module at each call
    solve.MOST_STEPS = prefill.MOST_STEPS = tl.constexpr(most_steps)
    try:
        return run(case)
    finally:
        solve.MOST_STEPS = prefill.MOST_STEPS = before


def run_counts(case: Case, dtype: str, part_keys: int, counts: int) -> dict[str, np.ndarray]:
    """Run op PagedAttention over parts, with `counts` launches of entmax's search before one program goes on alone."""
    from sharp.plugins.triton import launch_plan, launching

    before = launch_plan.COUNTS, launch_plan.SPARSEMAX_COUNTS
    launch_plan.COUNTS = launch_plan.SPARSEMAX_COUNTS = counts
    launching._kernels.cache_clear()  # because the launched kernels depend on these settings
    try:
        return run(case, dtype, dtype, part_keys)
    finally:
        launch_plan.COUNTS, launch_plan.SPARSEMAX_COUNTS = before
        launching._kernels.cache_clear()


def plan(lengths: list[tuple[int, int]], multiprocessors: int, window: int = -1) -> tuple[int, list[int], list[int]]:
    """Return the plan of a decode step of 32 heads in groups of 4.

    The plan is the most keys of a split, the first item of every unit, and the unit of every item. `lengths` are the
    context and the new tokens of every sequence.
    """
    import torch

    from sharp.plugins.triton import launching
    from sharp.plugins.triton.launch_plan import Shapes
    from sharp.plugins.triton.options import Options
    from sharp.plugins.triton.variants import kernels

    options = Options("softmax", "float32", "float32", 16, 16, 16)
    tokens = sum(new for _, new in lengths)
    blocks = max(-(-sum(length) // 16) for length in lengths)
    shapes = Shapes(tokens, len(lengths), blocks, 32, 8, multiprocessors)
    found = {kernel.name: kernel for kernel in kernels(options, 90)}
    planned = launching.plan_of(options, shapes, found)
    first = planned.launches[0]
    made = torch.full((planned.scratch["plan"],), -7, dtype=torch.int32)
    nothing = torch.zeros(tokens, 32, 16)
    arguments = dict.fromkeys(("query", "key", "value", "key_cache", "value_cache", "output", "stats"), nothing)
    starts = np.cumsum([0, *(new for _, new in lengths)], dtype=np.int32)
    integers = {
        "slot_mapping": np.full(tokens, -1, np.int32),
        "query_start": starts,
        "context_lens": np.array([context for context, _ in lengths], np.int32),
    }
    launching.launch(
        found[first.function],
        first.grid,
        arguments
        | {name: torch.tensor(array) for name, array in integers.items()}
        | {"plan": made, "tokens": tokens, "sequences": len(lengths), "q_heads": 32, "kv_heads": 8, "slots": 0}
        | {"max_blocks": blocks, "most_tokens": planned.most_tokens, "units": planned.units}
        | {
            "workers": planned.workers,
            "items": planned.items,
            "columns": 4,
            "window": window,
            "causal": 1,
        },
    )
    behind = 1 + planned.units
    numbers = made.tolist()
    return numbers[0] * found[first.function].constants["OPTIONS"].keys, numbers[1:behind], numbers[behind:]


def passes_of_decoding(case: Case) -> int:
    """Return how often entmax's search reads the logits of a step with one row."""
    from sharp.plugins.triton import solve

    once, passes = solve.stored_entmax_sums, 0

    def counted(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return once(*arguments)

    solve.stored_entmax_sums = counted
    try:
        run(case)
    finally:
        solve.stored_entmax_sums = once
    return passes


def run_chunks(case: Case, places: int) -> dict[str, np.ndarray]:
    """Run op PagedAttention with chunks of `places` places in entmax's list of tiles."""
    import triton.language as tl

    from sharp.plugins.triton import walk

    before = walk.CHUNK
    walk.CHUNK = tl.constexpr(places)
    try:
        return run(case)
    finally:
        walk.CHUNK = before


@contextmanager
def parts_of(keys: int | None) -> Iterator[None]:
    """Split the keys of prompts into parts of `keys`, as on a device of 16 multiprocessors, in the block.

    None leaves the usual split.
    """
    from sharp.plugins.triton import launch_plan, launching

    before = launch_plan.PART_KEYS, launching.INTERPRETED
    if keys is not None:
        launch_plan.PART_KEYS, launching.INTERPRETED = keys, (90, 16)
    launching.device_of.cache_clear()
    try:
        yield
    finally:
        launch_plan.PART_KEYS, launching.INTERPRETED = before
        launching.device_of.cache_clear()


def run(
    case: Case, dtype: str = "float32", cache_dtype: str = "float32", part_keys: int | None = None
) -> dict[str, np.ndarray]:
    """Return the outputs of op PagedAttention as float32 arrays, for inputs in the given dtypes."""
    from sharp.plugins.triton.paged_attention import paged_attention

    tensors = _tensors(case, dict.fromkeys(DATA, dtype) | dict.fromkeys(CACHES, cache_dtype))
    with parts_of(part_keys):
        results = paged_attention(**tensors, normalizer=case.normalizer, **case.attributes)
    # the caches are changed in place
    assert results[1] is tensors["key_cache"] and results[2] is tensors["value_cache"]
    found = {name: _numbers(tensor) for name, tensor in zip(RESULTS, results, strict=True)}
    return found | {name: tensors[name].numpy() for name in (*SCALES, "key_screen") if name in tensors}


def cache_reads(case: Case, dtype: str, part_keys: int | None) -> tuple[float, float]:
    """Return how often a call reads the keys and the values of its only sequence, on average."""
    from sharp.plugins.triton.paged_attention import paged_attention

    tensors = _tensors(case, dict.fromkeys((*DATA, *CACHES), dtype))
    keys = int(case.inputs["context_lens"][0]) + len(case.inputs["key"])
    MEMORY.read.clear()
    with parts_of(part_keys):
        paged_attention(**tensors, normalizer=case.normalizer, **case.attributes)
    _, heads, dim, _ = tensors["key_cache"].shape
    in_all = keys * heads * dim
    key_reads, value_reads = (MEMORY.read[tensors[name].data_ptr()] / in_all for name in CACHES)
    return key_reads, value_reads


def screen_reads(case: Case, dtype: str) -> tuple[float, float, float]:
    """Return the share of keys that a call reads, and how often it reads the screen's words and the values."""
    from sharp.plugins.triton.paged_attention import paged_attention

    tensors = _tensors(case, dict.fromkeys((*DATA, *CACHES), dtype))
    keys = int(case.inputs["context_lens"][0]) + len(case.inputs["key"])
    MEMORY.read.clear()
    paged_attention(**tensors, normalizer=case.normalizer, **case.attributes)
    _, heads, dim, block_size = tensors["key_cache"].shape
    words = tensors["key_screen"].shape[2] // (4 * block_size)
    numbers = {"key_cache": dim, "key_screen": words, "value_cache": dim}
    key_reads, word_reads, value_reads = (
        MEMORY.read[tensors[name].data_ptr()] / (keys * heads * each) for name, each in numbers.items()
    )
    return key_reads, word_reads, value_reads


def sample(
    logits: np.ndarray,
    samplings: np.ndarray,
    indices: np.ndarray | None,
    sizes: tuple[int, int],
    changes: Changes | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of `sampling.sample` and the changed logits, with its memory accesses checked.

    `sizes` are the sizes of tiles and of lists of candidates.
    """
    import torch

    from sharp.plugins.triton import sampling

    def watched(*tensors: torch.Tensor) -> None:
        with MEMORY.watched(place_of(tensor) for tensor in tensors if tensor.numel()):
            launch(*tensors)

    launch, constants = sampling.launch, dict(sampling.CONSTANTS)
    sampling.launch = watched
    sampling.CONSTANTS.update(zip(constants, sizes, strict=True))
    try:
        given, changed = None if indices is None else torch.tensor(indices), torch.tensor(logits)
        tokens: np.ndarray = sampling.sample(changed, torch.tensor(samplings), given, changes).numpy()
    finally:
        sampling.launch = launch
        sampling.CONSTANTS.update(constants)
    return tokens, changed.numpy()


def sampling_reads(logits: np.ndarray, samplings: np.ndarray, sizes: tuple[int, int]) -> float:
    """Return how often `sample` reads its logits."""
    MEMORY.read.clear()
    sample(logits, samplings, None, sizes)
    return max(MEMORY.read.values()) / logits.size


def run_attention(
    case: attention_cases.Case, dtype: str = "float32", part_keys: int | None = None
) -> dict[str, np.ndarray]:
    """Return the outputs of op SharpAttention as float32 arrays, for inputs in the given dtype."""
    from sharp.plugins.triton.attention import attention

    tensors = _tensors(case, dict.fromkeys((*DATA, *PASTS), dtype))
    with parts_of(part_keys):
        results = attention(**tensors, normalizer=case.normalizer, **case.attributes)
    if "past_lens" in tensors:
        # the caches are changed in place
        assert results[1] is tensors["past_key"] and results[2] is tensors["past_value"]
    return {name: tensor.float().numpy() for name, tensor in zip(attention_cases.OUTPUTS, results, strict=True)}


def _tensors(case: Case | attention_cases.Case, dtypes: dict[str, str]) -> dict[str, Any]:
    import torch

    def tensor_of(name: str, array: np.ndarray) -> Any:
        tensor = torch.tensor(array)
        if array.dtype == np.uint8:  # the bytes of e4m3
            return tensor.view(torch.float8_e4m3fn)
        return tensor.to(getattr(torch, dtypes[name])) if name in dtypes else tensor

    return {name: tensor_of(name, array) for name, array in case.inputs.items()}


def _numbers(tensor: Any) -> np.ndarray:
    """Return the numbers as float32, or the bytes of e4m3."""
    import torch

    held = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor.float()
    numbers: np.ndarray = held.numpy()
    return numbers
