"""Calls of PagedAttention under entmax with a key screen, and functions that run them."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from sharp.plugins import library_path
from sharp.plugins.op.key_screen import Screen, intervals, screen_of_cache, unpack
from sharp.plugins.op.reference import AttentionOutput
from sharp.plugins.op.schema import DEFAULT_ALPHA, DOMAIN, INPUTS, OUTPUTS, VERSION
from tests.plugins.conformance.cases import Case, Shape, make_case

TYPES = {
    "float32": (np.dtype(np.float32), onnx.TensorProto.FLOAT),
    "float16": (np.dtype(np.float16), onnx.TensorProto.FLOAT16),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), onnx.TensorProto.BFLOAT16),
}
LONG = Shape(sequences=((3000, 1), (700, 4), (0, 9), (600, 0)), kv_heads=2, group=3, head_dim=64, value_dim=16)


def screened_case(
    shape: Shape = LONG, seed: int = 0, shift: bool = True, alibi: bool = False, **attributes: Any
) -> Case:
    """Return a case with a key screen, whose logits are spread so widely that some keys have no weight."""
    case = make_case("entmax", shape, seed, alibi, **{"scale": 3 * shape.head_dim**-0.5, **attributes})
    return with_screen(case, shift=shift)


def with_screen(case: Case, dtype: str = "float32", shift: bool = True) -> Case:
    """Return the case with caches of `dtype` and with the screen that belongs to their content."""
    kind, _ = TYPES[dtype]
    caches = {name: case.inputs[name].astype(kind).astype(np.float32) for name in ("key_cache", "value_cache")}
    new = {name: case.inputs[name].astype(kind).astype(np.float32) for name in ("key", "value")}
    inputs = {name: array for name, array in case.inputs.items() if not name.startswith("key_s")} | caches | new
    if shift:
        heads, channels = caches["key_cache"].shape[1:3]
        inputs["key_shift"] = np.random.default_rng(5).normal(0, 0.3, (heads, channels)).astype(np.float32)
    inputs["key_screen"] = screen_of_cache(caches["key_cache"], inputs.get("key_shift"))
    return replace(case, inputs=inputs)


def run(case: Case, dtype: str = "float32", screen: bool = True, threads: int = 2) -> AttentionOutput:
    """Return the kernel's outputs with caches of `dtype`, as float32; without `screen` the kernel reads all keys."""
    kind, number = TYPES[dtype]
    auxiliary = [name for name in ("key_screen", "key_shift") if screen and name in case.inputs]
    names = [name if name in case.inputs else "" for name in INPUTS]
    names += ["", "", *(name if name in auxiliary else "" for name in ("key_screen", "key_shift"))] if auxiliary else []
    outputs = [*OUTPUTS, *(["", "", "key_screen_out"] if auxiliary else [])]
    node = helper.make_node("PagedAttention", names, outputs, domain=DOMAIN, normalizer="entmax", **case.attributes)
    caches = ("key_cache", "value_cache")

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        type_ = number if name.removesuffix("_out") in caches else helper.np_dtype_to_tensor_dtype(array.dtype)
        return helper.make_tensor_value_info(name, type_, None)

    used = {name: case.inputs[name] for name in names if name}
    like = {"key_cache_out": used["key_cache"], "value_cache_out": used["value_cache"]}
    like |= {"key_screen_out": used["key_screen"]} if auxiliary else {}
    produced = [name for name in outputs if name]
    graph = helper.make_graph(
        [node],
        "screened",
        [info(name, array) for name, array in used.items()],
        [info(name, like.get(name, used["query"])) for name in produced],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, VERSION)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(library_path("onnxruntime"))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    loaded = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {
        name: _value(array.astype(kind), number) if name in caches else ort.OrtValue.ortvalue_from_numpy(array)
        for name, array in used.items()
    }
    found = dict(zip(produced, loaded.run_with_ort_values(produced, feeds), strict=True))
    arrays = {
        name: _array(value, kind if name.removesuffix("_out") in caches else None) for name, value in found.items()
    }
    return AttentionOutput(
        *(arrays[name] for name in OUTPUTS),
        key_screen=arrays.get("key_screen_out"),  # type: ignore[arg-type]
    )


def _value(array: np.ndarray, number: int) -> Any:
    held = np.ascontiguousarray(array)
    if number == onnx.TensorProto.BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(held.view(np.uint16), number)
    return ort.OrtValue.ortvalue_from_numpy(held)


def _array(value: Any, kind: np.dtype | None) -> np.ndarray:
    if kind is not None and kind.name == "bfloat16":
        from torch.utils.dlpack import from_dlpack

        widened: np.ndarray = from_dlpack(value._ortvalue.to_dlpack()).float().numpy()
        return widened
    array: np.ndarray = value.numpy()
    return array if kind is None else array.astype(np.float32)


def poisoned(case: Case, dtype: str = "float32") -> tuple[Case, int]:
    """Return the case with NaN in keys that the screen surely leaves out, and the number of strips of 16 such keys.

    Keys are surely left out by float64 intervals of the past alone, with 0.05 to spare, because the keys of the call
    can only raise the limit. With statistics, strips that may hold the smallest logit stay unchanged. The function is
    for calls without soft cap, slopes, window and holes.
    """
    inputs, strips = case.inputs, 0
    kind, _ = TYPES[dtype]
    cache = inputs["key_cache"].copy()
    _, kv_heads, head_dim, block_size = cache.shape
    screen = unpack(screen_of_cache(cache.astype(kind), inputs.get("key_shift")), head_dim, block_size)
    shift = inputs.get("key_shift", np.zeros((kv_heads, head_dim), np.float32))
    group, alpha = inputs["query"].shape[1] // kv_heads, case.attributes.get("alpha", DEFAULT_ALPHA)
    for sequence, context in enumerate(inputs["context_lens"] // 16 * 16):
        tokens = slice(*inputs["query_start"][sequence : sequence + 2])
        positions = np.arange(context)
        blocks, offsets = inputs["block_table"][sequence, positions // block_size], positions % block_size
        for head in range(kv_heads):
            of_keys = Screen(*(part[blocks, head, offsets] for part in vars(screen).values()))
            kept = np.zeros(context // 16, bool)
            queries = inputs["query"][tokens, head * group : (head + 1) * group].reshape(-1, head_dim)
            for query in queries * np.float32(case.attributes["scale"]):
                lower, upper = intervals(query, of_keys, shift[head])
                kept |= upper.reshape(-1, 16).max(1) > lower.max() - 1 / (alpha - 1) - 0.05
                if inputs["collect_stats"]:
                    kept |= lower.reshape(-1, 16).min(1) < upper.min() + 0.05
            left = np.repeat(~kept, 16)
            cache[blocks[left], head, :, offsets[left]] = np.nan
            strips += int((~kept).sum())
    return case.with_inputs(key_cache=cache), strips
