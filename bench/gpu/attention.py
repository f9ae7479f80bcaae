"""Op Attention, over contiguous keys, on a GPU against float64; nothing is timed."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
import torch

import bench.gpu.source_tree  # noqa: F401 - makes sharp.plugins importable
from bench.gpu.cases import Cases
from bench.gpu.compilation import Compilations
from bench.gpu.correctness import TOLERANCES, computed, statistics_errors, statistics_limits, submit
from bench.gpu.inputs import Call, columns_with, random_head_params, to_numpy
from sharp.plugins.op.attention_reference import attention as reference
from sharp.plugins.op.attributes import NORMALIZERS
from sharp.plugins.op.normalizers import Normalizer
from sharp.plugins.triton.options import Options, power_name

BATCH, Q_HEADS, KV_HEADS = 3, 6, 2
PAST = 700
# (queries, new keys) by form.
SHAPES = {
    "none": ((200, 200), (1, 1500), (40, 300)),  # a prompt, and cross-attention of one query and of several
    "concatenating": ((1, 1), (60, 60)),
    "shared": ((1, 1), (60, 60)),
}


def cases(quick: bool) -> list[dict[str, Any]]:
    """Return the arguments of `make_call` for every case.

    With `quick` there are fewer dtypes and normalizers.
    """
    dtypes = (torch.bfloat16,) if quick else tuple(TOLERANCES)
    normalizers = ("softmax", "ssa", "adaptive_softmax", "entmax") if quick else NORMALIZERS
    return [
        {"normalizer": normalizer, "dtype": dtype, "form": form, "queries": queries, "new_keys": new_keys}
        for dtype in dtypes
        for normalizer in normalizers
        for form, shapes in SHAPES.items()
        for queries, new_keys in shapes
    ]


def make_call(
    normalizer: str,
    form: str,
    queries: int,
    new_keys: int,
    *,
    past: int = PAST,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    device: str = "cuda",
    sinks: bool = False,
) -> Call:
    """Make Gaussian inputs with slopes and statistics; in all forms some keys of the second sequence do not count.

    `form` is "none" (no past keys), "concatenating" (`past` keys before the new ones) or "shared" (past and new keys in
    one buffer of `past` keys). The call is causal if there are as many queries as new keys. Keys and values that no
    query may see are NaN.
    """
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"device": device, "generator": generator}

    def gaussian(heads: int, length: int) -> torch.Tensor:
        return torch.randn(BATCH, heads, length, head_dim, **options).to(dtype)

    tensors = {
        "query": gaussian(Q_HEADS, queries),
        "key": gaussian(KV_HEADS, new_keys),
        "value": gaussian(KV_HEADS, new_keys),
        "alibi_slopes": torch.rand(Q_HEADS, **options) / 8,
        "collect_stats": torch.tensor(True, device=device),
    }
    if (head_params := random_head_params(normalizer, Q_HEADS, sinks, options)) is not None:
        tensors["head_params"] = head_params
    filled = torch.zeros(BATCH, dtype=torch.int32)
    if form != "none":
        tensors |= {"past_key": gaussian(KV_HEADS, past), "past_value": gaussian(KV_HEADS, past)}
        filled += past
    if form == "shared":
        filled = torch.tensor([past - new_keys, 0, past // 2], dtype=torch.int32)
        tensors["past_lens"] = filled.to(device)
        for sequence, first in enumerate(filled.tolist()):
            for name in ("past_key", "past_value"):
                tensors[name][sequence, :, first:] = float("nan")
    totals = filled + new_keys
    totals[1] -= new_keys // 3
    tensors["total_lens"] = totals.to(device)
    for name in ("key", "value"):
        tensors[name][1, :, new_keys - new_keys // 3 :] = float("nan")
    attributes = {"scale": head_dim**-0.5, "causal": queries == new_keys, **columns_with(sinks)}
    return Call(normalizer, tensors, attributes)


def options_of(call: Call) -> Options:
    """Return the compile-time options of a call."""
    query = call.tensors["query"]
    name = str(query.dtype).removeprefix("torch.")
    power = power_name(call.attributes.get("alpha", 1.5)) if call.normalizer == "entmax" else ""
    return Options(
        call.normalizer, name, name, query.shape[3], query.shape[3], 16, True, True, contiguous=True, power=power
    )


def run(call: Call) -> tuple[torch.Tensor, ...]:
    """Run the op by Sharp's kernels and return output, present key and value, and stats; a shared buffer changes."""
    from sharp.plugins.triton.attention import attention

    return attention(**call.tensors, normalizer=call.normalizer, **call.attributes)


def expected(arrays: dict[str, np.ndarray], normalizer: str, attributes: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Return output, presents and stats in float64; `arrays` are the call's tensors before the op runs.

    `attributes` are the op's attributes by name.
    """
    result = reference(**arrays, normalizer=Normalizer(normalizer), **attributes)  # type: ignore[arg-type]
    return result.output, result.present_key, result.present_value, result.stats


def compare(
    call: Call, references: tuple[np.ndarray, ...], launch: Callable[[Call], tuple[torch.Tensor, ...]] = run
) -> dict[str, Any]:
    """Return the errors of `launch`, and in `holds` whether they are those of rounding.

    `references` are those of `expected`. The errors are output (the relative norm of its error), presents (0 if they
    are equal, else 1), and the largest difference in each column of the statistics.
    """
    output, *presents, stats = (tensor.float().cpu().numpy() for tensor in launch(call))
    pairs = zip(presents, references[1:3], strict=True)
    errors = {
        "output": float(np.linalg.norm(output - references[0]) / np.linalg.norm(references[0])),
        "presents": float(not all(np.array_equal(found, right, equal_nan=True) for found, right in pairs)),
        **statistics_errors(stats, references[3]),
    }
    limits = {"output": TOLERANCES[call.tensors["query"].dtype], "presents": 0.0, **statistics_limits(call)}
    return {**errors, "holds": all(errors[name] <= limits[name] for name in limits.keys() & errors.keys())}


def check(
    quick: bool, executor: Executor, capability: int, cases_done: Cases, device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case, of all or of fewer (`quick`), with the errors of `compare`.

    References and compilation for `capability` (90 is 9.0) run in the executor's processes, all at once.
    """
    listed = cases(quick)
    calls = [make_call(**case, device=device) for case in listed]
    compilations = Compilations(executor, capability)
    for call in calls:
        compilations.begin(options_of(call))
    references = [
        submit(executor, expected, to_numpy(call.tensors), call.normalizer, call.attributes) for call in calls
    ]

    def compared(number: int) -> Iterator[dict[str, Any]]:
        """Yield the row of errors of call `number` against its reference."""
        yield compare(calls[number], computed(references[number], calls[number], expected))

    for number, case in enumerate(listed):
        named = {"op": "SharpAttention", **{name: str(value).removeprefix("torch.") for name, value in case.items()}}
        ready = partial(compilations.finish, options_of(calls[number]))
        yield from cases_done.run(named, partial(compared, number), ready)
