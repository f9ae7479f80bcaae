"""Inputs of PagedAttention on a device, and their float64 reference."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bench.gpu.source_tree  # noqa: F401 - makes sharp.plugins importable
from sharp.plugins.op.attributes import (
    DEFAULT_STATS_COLUMNS,
    HEAD_PARAMETERS,
    STATS_COLUMNS_WITH_SINK,
    WITHOUT_SINK,
)
from sharp.plugins.op.e4m3 import scale_of
from sharp.plugins.op.key_screen import screen_of_cache
from sharp.plugins.op.normalizers import Normalizer
from sharp.plugins.op.reference import attend, head_values, paged_attention, visible_keys

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Call:
    """One call of the op: its input tensors by name, the normalizer and the other attributes."""

    normalizer: str
    tensors: dict[str, Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)

    def with_normalizer(self, normalizer: str) -> "Call":
        """Return a call with another normalizer, which shares the tensors; ssa gets random head_params, others none."""
        query = self.tensors["query"]
        tensors = {name: tensor for name, tensor in self.tensors.items() if name != "head_params"}
        generator = torch.Generator(query.device).manual_seed(0)
        options = {"device": query.device, "generator": generator}
        if (head_params := random_head_params(normalizer, query.shape[1], False, options)) is not None:
            tensors["head_params"] = head_params
        return Call(normalizer, tensors, self.attributes)

    def with_tensors(self, **tensors: Tensor) -> "Call":
        """Return a call with these inputs changed or added, by their names; it shares the others."""
        return replace(self, tensors={**self.tensors, **tensors})


def make_call(
    normalizer: str,
    sequences: tuple[tuple[int, int], ...],
    *,
    q_heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    device: str = "cuda",
    spread: float = 1.0,
    alibi: bool = False,
    statistics: bool | None = False,
    sinks: bool = False,
    screened: bool = False,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
    **attributes: Any,
) -> Call:
    """Make Gaussian queries, keys and values in a cache whose blocks are shuffled.

    Args:
        normalizer: the name of the normalizer.
        sequences: (context, new tokens) of every sequence.
        q_heads: the number of query heads.
        kv_heads: the number of key-value heads.
        head_dim: the number of channels of keys and values.
        dtype: the dtype of all tensors but the small ones.
        cache_dtype: the dtype of the caches, if another one; int8 and float8_e4m3fn have auxiliary scales.
        device: the device of all tensors.
        spread: standard deviation of the logits; a larger one gives entmax a smaller support.
        alibi: whether there are slopes.
        statistics: the value of `collect_stats`, which served models have; None leaves it out.
        sinks: whether heads have sinks.
        screened: whether the cache has a key screen.
        block_size: the number of keys of a cache block.
        seed: the seed of all random numbers.
        attributes: the op's other attributes.
    """
    generator = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"device": device, "generator": generator}

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32 if device == "cpu" else dtype, **options).to(dtype)

    blocks = [-(-(context + new) // block_size) for context, new in sequences]
    tokens = sum(new for _, new in sequences)
    order = torch.randperm(sum(blocks) + 1, **options).int()
    table = torch.full((len(blocks), max(blocks)), -1, dtype=torch.int32, device=device)
    slots = []
    for sequence, (count, first) in enumerate(zip(blocks, np.cumsum([0, *blocks[:-1]]).tolist(), strict=True)):
        table[sequence, :count] = order[first : first + count]
        context, new = sequences[sequence]
        positions = torch.arange(context, context + new, device=device)
        slots.append(table[sequence, positions // block_size] * block_size + positions % block_size)
    tensors = {
        "query": gaussian(tokens, q_heads, head_dim),
        "key": gaussian(tokens, kv_heads, head_dim),
        "value": gaussian(tokens, kv_heads, head_dim),
        "key_cache": gaussian(sum(blocks) + 1, kv_heads, head_dim, block_size),
        "value_cache": gaussian(sum(blocks) + 1, kv_heads, block_size, head_dim),
        "slot_mapping": torch.cat(slots).int(),
        "block_table": table,
        "query_start": _integers(np.cumsum([0, *(new for _, new in sequences)]), device),
        "context_lens": _integers([context for context, _ in sequences], device),
    }
    if (head_params := random_head_params(normalizer, q_heads, sinks, options)) is not None:
        tensors["head_params"] = head_params
    if cache_dtype is not None:
        tensors |= _in_cache_dtype(tensors, cache_dtype)
    if screened:
        screen = screen_of_cache(tensors["key_cache"].float().cpu().numpy())
        tensors["key_screen"] = torch.as_tensor(screen, device=device)
    if alibi:
        tensors["alibi_slopes"] = torch.rand(q_heads, **options)
    if statistics is not None:
        tensors["collect_stats"] = torch.tensor(statistics, device=device)
    return Call(normalizer, tensors, {"scale": spread * head_dim**-0.5, **columns_with(sinks), **attributes})


def _in_cache_dtype(tensors: dict[str, Tensor], cache_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the inputs that change if the caches have this dtype: the caches, with their scales or the new tokens."""
    changed: dict[str, Tensor] = {}
    for side in ("key", "value"):
        cache, new = tensors[f"{side}_cache"], tensors[side]
        if cache_dtype not in (torch.int8, torch.float8_e4m3fn):
            changed[f"{side}_cache"] = cache.to(cache_dtype)
            # New keys and values are numbers that the cache can hold, because the reference stores others unrounded.
            changed[side] = new.to(cache_dtype).to(new.dtype)
            continue
        largest = cache.float().abs().amax((2, 3))
        if cache_dtype == torch.int8:
            scale = largest / 127
        else:
            scale = torch.as_tensor(scale_of(largest.cpu().numpy()), device=cache.device)
        numbers = cache.float() / scale[:, :, None, None]
        changed[f"{side}_cache"] = (numbers.round() if cache_dtype == torch.int8 else numbers).to(cache_dtype)
        changed[f"{side}_scale"] = scale
    return changed


def columns_with(sinks: bool) -> dict[str, int]:
    """Return the attribute for the sink's mass if heads have sinks."""
    return {"stats_columns": STATS_COLUMNS_WITH_SINK} if sinks else {}


def random_head_params(normalizer: str, q_heads: int, sinks: bool, options: dict[str, Any]) -> Tensor | None:
    """Return head_params [q_heads, P]: ssa's b and n, and sinks as large as a sum of some keys; None if neither.

    Normalizers without a sink have their own parameters (bias and power) if `sinks`. `options` are torch's device and
    generator.
    """
    if normalizer in WITHOUT_SINK:
        return torch.rand(q_heads, len(HEAD_PARAMETERS[normalizer]), **options) if sinks else None
    columns = []
    if normalizer == "ssa":
        columns.append(torch.rand(q_heads, 2, **options) * 1.5 + torch.tensor([0.3, 1.0], device=options["device"]))
    if sinks:
        columns.append(torch.rand(q_heads, 1, **options) * 6 - 1)
    return torch.cat(columns, 1) if columns else None


# The inputs that the op updates in place, if a call has them.
UPDATED = ("key_cache", "value_cache", "key_scale", "value_scale", "key_screen")


def run(call: Call) -> tuple[Tensor, ...]:
    """Run the op by Sharp's kernels, and return output, caches (which change), their scales or screen, and stats."""
    from sharp.plugins.triton.paged_attention import paged_attention as ours

    output, *_, stats = ours(**call.tensors, normalizer=call.normalizer, **call.attributes)
    return output, *(call.tensors[name] for name in UPDATED if name in call.tensors), stats


def expected(arrays: dict[str, np.ndarray], normalizer: str, attributes: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Return output, caches, scales or screen, and stats in float64; `arrays` are the tensors before the op runs.

    `attributes` are the op's attributes by name.
    """
    attributes = dict(attributes)
    options = {name: attributes.pop(name) for name in ("alpha",) if name in attributes}
    result = paged_attention(**arrays, normalizer=Normalizer(normalizer, **options), **attributes)  # type: ignore[arg-type]
    return result.output, *(getattr(result, name) for name in UPDATED if name in arrays), result.stats


def expected_row(call: Call, token: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Return output [value_dim] and statistics [4 or 5] of one row in float64, from the caches after the call.

    The caches must be in blocks of 16 and of floating point. `token` and `head` are 0-based.
    """
    tensors, attributes = call.tensors, call.attributes
    starts = tensors["query_start"].tolist()
    sequence = next(index for index in range(len(starts) - 1) if starts[index] <= token < starts[index + 1])
    context = int(tensors["context_lens"][sequence])
    position, total = context + token - starts[sequence], context + starts[sequence + 1] - starts[sequence]
    keys = visible_keys(position, total, attributes.get("window", -1), attributes.get("causal", True))
    blocks = tensors["block_table"][sequence].cpu().numpy()[keys // BLOCK_SIZE]
    kv_head = head // (tensors["query"].shape[1] // tensors["key"].shape[1])
    places = torch.as_tensor(blocks, device=tensors["query"].device).long()
    offsets = torch.as_tensor(keys % BLOCK_SIZE, device=tensors["query"].device).long()
    slopes, head_params = (tensors.get(name) for name in ("alibi_slopes", "head_params"))
    output, statistics = attend(
        tensors["query"][token, head].double().cpu().numpy(),
        tensors["key_cache"][places, kv_head, :, offsets].double().cpu().numpy(),
        tensors["value_cache"][places, kv_head, offsets].double().cpu().numpy(),
        keys - position,
        *head_values(head, *(None if given is None else given.cpu().numpy() for given in (slopes, head_params))),
        normalizer=Normalizer(call.normalizer, **{k: v for k, v in attributes.items() if k == "alpha"}),
        scale=attributes["scale"],
        softcap=attributes.get("softcap", 0.0),
    )
    columns = attributes.get("stats_columns", DEFAULT_STATS_COLUMNS)
    return output, np.array(list(vars(statistics).values()))[:columns]


def to_numpy(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Return copies on the host by name; 16-bit numbers become float32, those of e4m3 bytes."""
    return {name: on_host(tensor) for name, tensor in tensors.items()}


def on_host(tensor: Tensor) -> np.ndarray:
    """Return a copy on the host, with 16-bit numbers as float32 and those of e4m3 as bytes."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor = tensor.view(torch.uint8)
    copied: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy().copy()
    return copied


def _integers(numbers: Any, device: str) -> Tensor:
    """Return numbers as an int32 tensor on the device."""
    return torch.as_tensor(np.asarray(numbers), dtype=torch.int32, device=device)
