"""The subjects of the attention benchmark: Sharp's op and its peers, each as a step over several layers.

Every subject is made from the same workload and has its caches filled before the clock starts. All caches, the peers'
too, are in memory like the server's (`page_memory`). A step is one call of attention in one layer, which also stores
the new tokens' keys and values, except under torch, whose keys and values are stored before.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bench.attention_data import LayerInputs
from sharp.plugins import library_path
from sharp.plugins.cpu import page_memory
from sharp.plugins.op.key_screen import screen_of_cache
from sharp.plugins.op.schema import BESIDE_CACHE, CONSTANTS, DEFAULT_ALPHA, DOMAIN, INPUTS, OUTPUTS, VERSION

Step = Callable[[int], object]  # layer -> whatever attention returns
BLOCK_SIZE = 16
_OPSETS = {"": 23, DOMAIN: VERSION, "com.microsoft": 1}
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
}


@dataclass(frozen=True)
class Workload:
    """One shape of work: the last `queries` tokens of `sequences` sequences of `context` tokens attend."""

    name: str
    layers: list[LayerInputs]
    sequences: int
    context: int
    queries: int

    @property
    def q_heads(self) -> int:
        """The number of query heads."""
        return self.layers[0].query.shape[1]

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads."""
        return self.layers[0].key.shape[1]

    @property
    def head_dim(self) -> int:
        """The number of channels of a head."""
        return self.layers[0].key.shape[2]

    @property
    def scale(self) -> float:
        """The factor of query . key."""
        return float(self.head_dim**-0.5)

    def cache_bytes(self, itemsize: int) -> int:
        """Return the bytes of the keys and values of one layer, all sequences, with `itemsize` bytes for a number."""
        return 2 * self.sequences * self.context * self.kv_heads * self.head_dim * itemsize

    def operations(self) -> int:
        """Return the multiplications and additions of the two matrix products of one layer, causal."""
        pairs = self.queries * (self.context - self.queries) + self.queries * (self.queries + 1) // 2
        return 4 * self.sequences * pairs * self.q_heads * self.head_dim


def _one_node_session(
    node: object, inputs: list[str], outputs: list[str], types: dict[str, int], threads: int
) -> ort.InferenceSession:
    """Return a session of one node with the server's settings but for threads; `types` names what is not float32.

    `inputs` and `outputs` are the names of the node's values.
    """

    def infos(names: list[str]) -> list[object]:
        """Return ONNX declarations of these values, float32 unless `types` says otherwise."""
        return [helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None) for name in names]

    opsets = [helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()]
    graph = helper.make_graph([node], "attention", infos(inputs), infos(outputs))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(library_path("onnxruntime"))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class PagedInputs:
    """The inputs of Sharp's op for every layer of a workload, shared by all normalizers.

    Caches are in `dtype`, one of `ONNX_TYPES`, and in blocks of `block_size` keys, which are shuffled unless
    `blocks_in_order`. `layers` has the values by the op's input names; caches have key screens except in int8.
    """

    def __init__(self, work: Workload, dtype: str, blocks_in_order: bool = False, block_size: int = BLOCK_SIZE) -> None:
        self.work = work
        self.blocks_in_order = blocks_in_order
        self.block_size = block_size
        self.dtype = dtype
        self.layers = [self._values(layer, np.random.default_rng(number)) for number, layer in enumerate(work.layers)]

    def _values(self, layer: LayerInputs, generator: np.random.Generator) -> dict[str, ort.OrtValue]:
        """Return the op's inputs by name, with caches filled from the layer's keys and values.

        `generator` shuffles the blocks, unless they are to be in order.
        """
        work, block_size = self.work, self.block_size
        blocks_each = -(-work.context // block_size)
        blocks = np.arange(blocks_each * work.sequences, dtype=np.int32)
        table = (blocks if self.blocks_in_order else generator.permutation(blocks)).reshape(work.sequences, -1)
        positions = np.arange(work.context - work.queries, work.context)
        slots = table[:, positions // block_size] * block_size + positions % block_size
        tokens = work.sequences * work.queries
        feeds: dict[str, NDArray[np.generic]] = {
            name: np.tile(getattr(layer, name)[positions], (work.sequences, 1, 1)) for name in ("query", "key", "value")
        }
        feeds |= {
            "slot_mapping": slots.astype(np.int32).ravel(),
            "block_table": table,
            "query_start": np.arange(0, tokens + 1, work.queries, dtype=np.int32),
            "context_lens": np.full(work.sequences, work.context - work.queries, np.int32),
            "head_params": np.tile(np.array([1.0, 1.5], np.float32), (work.q_heads, 1)),
        }
        if layer.head_params is not None:
            feeds["head_params"] = layer.head_params
        if layer.alibi_slopes is not None:
            feeds["alibi_slopes"] = layer.alibi_slopes
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        padded = np.zeros((2, blocks_each * block_size, work.kv_heads, work.head_dim), np.float32)
        padded[0, : work.context], padded[1, : work.context] = layer.key, layer.value
        tiles = padded.reshape(2, blocks_each, block_size, work.kv_heads, work.head_dim)
        # [blocks, kv_heads, head_dim, block_size] and [blocks, kv_heads, block_size, head_dim]
        for name, blocks in (("key_cache", tiles[0].transpose(0, 2, 3, 1)), ("value_cache", tiles[1].swapaxes(1, 2))):
            cache = np.empty((blocks_each * work.sequences, *blocks.shape[1:]), np.float32)
            for row in table:
                cache[row] = blocks
            if self.dtype == "int8":
                scale = np.maximum(np.abs(cache).max((2, 3)) / 127, 1e-9).astype(np.float32)  # [blocks, kv_heads]
                values[name.replace("cache", "scale")] = ort.OrtValue.ortvalue_from_numpy(scale)
                cache /= scale[:, :, None, None]
                np.rint(cache, out=cache)
            values[name] = _cache_value(cache, self.dtype)
            if name == "key_cache" and self.dtype != "int8":
                values |= _screen_values(layer, cache.astype(_NUMPY_TYPES[self.dtype]))
        return values


def _screen_values(layer: LayerInputs, cache: NDArray[np.generic]) -> dict[str, ort.OrtValue]:
    """Return the inputs `key_screen` and `key_shift` for a key cache."""
    shift = layer.key.mean(0)
    screen = np.concatenate([screen_of_cache(blocks, shift) for blocks in np.array_split(cache, min(64, len(cache)))])
    return {
        "key_screen": ort.OrtValue.ortvalue_from_numpy(_in_pages(screen)),
        "key_shift": ort.OrtValue.ortvalue_from_numpy(shift),
    }


def ours(inputs: PagedInputs, normalizer: str, threads: int, statistics: bool = False, screen: bool = False) -> Step:
    """Return a step of Sharp's op in a one-node model, with caches bound in place; sparsemax is entmax with alpha 2.

    `statistics` is the value of collect_stats. `screen` uses the key screen, which the inputs have except in int8.
    `threads` is the number of ONNX Runtime's threads.
    """
    work, cache_type = inputs.work, ONNX_TYPES[inputs.dtype]
    used = [*inputs.layers[0], "collect_stats"]
    if not screen:
        used = [name for name in used if name not in ("key_screen", "key_shift")]
    if normalizer != "ssa":
        used.remove("head_params")
    auxiliary = [name for name in BESIDE_CACHE if name in used]
    outputs = [*OUTPUTS, *(f"{name}_out" if name in used else "" for name in BESIDE_CACHE)]
    types = {
        **dict.fromkeys(("key_cache", "value_cache", "key_cache_out", "value_cache_out"), cache_type),
        **dict.fromkeys(("key_screen", "key_screen_out"), TensorProto.INT8),
        **dict.fromkeys(("slot_mapping", "block_table", "query_start", "context_lens"), TensorProto.INT32),
        "collect_stats": TensorProto.BOOL,
    }
    node = helper.make_node(
        "PagedAttention",
        [name if name in used else "" for name in (*INPUTS, *BESIDE_CACHE, *CONSTANTS)],
        outputs,
        domain=DOMAIN,
        normalizer="entmax" if normalizer == "sparsemax" else normalizer,
        alpha=2.0 if normalizer == "sparsemax" else DEFAULT_ALPHA,
        scale=work.scale,
        key_bound=max(float(layer.key_bound) for layer in work.layers),
    )
    loaded = _one_node_session(node, used, [name for name in outputs if name], types, threads)
    collect = ort.OrtValue.ortvalue_from_numpy(np.array(statistics))
    shape = (work.sequences * work.queries, work.q_heads, work.head_dim)
    bindings = []
    for values in inputs.layers:
        binding = loaded.io_binding()
        for name in used:
            binding.bind_ortvalue_input(name, values.get(name, collect))
        for name in ("key_cache", "value_cache", *auxiliary):
            binding.bind_ortvalue_output(f"{name}_out", values[name])
        binding.bind_ortvalue_output("output", ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32))
        binding.bind_ortvalue_output("stats", ort.OrtValue.ortvalue_from_shape_and_type((*shape[:2], 4), np.float32))
        bindings.append(binding)
    return lambda layer: loaded.run_with_iobinding(bindings[layer])


_NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def _in_pages(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return a copy of the array in huge pages, where the system has them."""
    copy = page_memory.zeros(array.shape, array.dtype.type)
    copy[...] = array
    return copy


def _cache_value(array: NDArray[np.float32], dtype: str) -> ort.OrtValue:
    """Return a cache as an ONNX Runtime value of dtype "bfloat16", "float16" or "float32"."""
    if dtype == "bfloat16":
        bits = array.astype(ml_dtypes.bfloat16).view(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(_in_pages(bits), TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(_in_pages(array.astype(dtype)))


def group_query_attention(work: Workload, threads: int) -> Step:
    """Return a step of ONNX Runtime's GroupQueryAttention, float32, with past and present in one buffer."""
    kv_heads, head_dim = work.kv_heads, work.head_dim
    names = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
    outputs = ["output", "present_key", "present_value"]
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        outputs,
        domain="com.microsoft",
        num_heads=work.q_heads,
        kv_num_heads=kv_heads,
        scale=work.scale,
    )
    types = {"seqlens_k": TensorProto.INT32, "total_sequence_length": TensorProto.INT32}
    loaded = _one_node_session(node, names, outputs, types, threads)
    bindings = []
    for layer in work.layers:
        new = slice(work.context - work.queries, work.context)
        binding = loaded.io_binding()
        for name in ("query", "key", "value"):
            rows = getattr(layer, name)[new].reshape(1, work.queries, -1)
            array = np.repeat(rows, work.sequences, axis=0)
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name in ("key", "value"):
            cache = np.ascontiguousarray(getattr(layer, name).transpose(1, 0, 2))[None]  # [1, kv_heads, context, dim]
            value = ort.OrtValue.ortvalue_from_numpy(_in_pages(np.repeat(cache, work.sequences, axis=0)))
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(f"present_{name}", value)
        lengths = np.full(work.sequences, work.context - 1, np.int32)
        binding.bind_ortvalue_input("seqlens_k", ort.OrtValue.ortvalue_from_numpy(lengths))
        total = np.array([work.context], np.int32)
        binding.bind_ortvalue_input("total_sequence_length", ort.OrtValue.ortvalue_from_numpy(total))
        shape = (work.sequences, work.queries, work.q_heads * head_dim)
        binding.bind_ortvalue_output("output", ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32))
        bindings.append(binding)
    return lambda layer: loaded.run_with_iobinding(bindings[layer])


def _torch_heads(work: Workload) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return query [sequences, q_heads, queries, dim], key and value [sequences, kv_heads, context, dim] per layer."""
    new = slice(work.context - work.queries, work.context)
    return [
        tuple(
            torch.from_numpy(np.ascontiguousarray(array.transpose(1, 0, 2)))[None].repeat(work.sequences, 1, 1, 1)
            for array in (layer.query[new], layer.key, layer.value)
        )
        for layer in work.layers
    ]


def sdpa(work: Workload, threads: int) -> Step:
    """Return a step of torch's scaled_dot_product_attention, float32, with torch's threads set to `threads`.

    For many queries the key heads are repeated before, for speed.
    """
    torch.set_num_threads(threads)
    heads = _torch_heads(work)
    if work.queries > 1:
        group = work.q_heads // work.kv_heads
        heads = [(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for q, k, v in heads]
    heads = [tuple(torch.from_numpy(_in_pages(tensor.numpy())) for tensor in layer) for layer in heads]

    def step(layer: int) -> torch.Tensor:
        """Compute attention of a layer by torch's SDPA."""
        query, key, value = heads[layer]
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=work.queries > 1, enable_gqa=work.queries == 1
            )

    return step


def entmax_package(work: Workload, threads: int) -> Step:
    """Return a step of torch's matrix products around the `entmax` package's entmax15, float32.

    All weights of a layer are in memory. The package must be installed. Torch's threads are set to `threads`.
    """
    from entmax import entmax15

    torch.set_num_threads(threads)
    group = work.q_heads // work.kv_heads
    heads = _torch_heads(work)
    first = work.context - work.queries
    masked = torch.arange(work.context)[None, :] > torch.arange(first, work.context)[:, None]

    def step(layer: int) -> torch.Tensor:
        """Compute attention of a layer with entmax 1.5 of the package entmax."""
        query, key, value = heads[layer]
        with torch.inference_mode():
            grouped = query.unflatten(1, (work.kv_heads, group))  # [sequences, kv_heads, group, queries, dim]
            logits = grouped @ key.unsqueeze(2).transpose(-1, -2) * work.scale
            weights = entmax15(logits.masked_fill(masked, -1e30), dim=-1)
            return weights @ value.unsqueeze(2)

    return step
