"""`AttentionReader`: the weights that one head gives the tokens of a sequence, computed anew on a CPU.

No kernel writes weights. What it makes them of are the queries, which a graph can show, and the keys, which are in the
cache; the float64 reference of the op makes the weights of a row of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from sharp.plugins import page_memory
from sharp.plugins.cache_tensors import ELEMENTS, CacheTensor, cache_tensors
from sharp.plugins.graph_attention import attention_nodes, showing
from sharp.plugins.kernel_library import register_kernels
from sharp.plugins.manifest import Manifest
from sharp.plugins.ops import e4m3
from sharp.plugins.ops.reference import head_values, row_weights
from sharp.serving.api.errors import InputError

CHUNK = 256  # tokens whose activations are in memory together
MOST_TOKENS = 4096
MOST_BYTES = 2**30  # of queries and caches
# ONNX Runtime's name for: the folder of external data, for a model that is given as bytes.
DATA_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class AttentionRow:
    """The weights float64 [n] of the keys that a query sees, from the one at position `first` on.

    `entropy` is that of the weights in nats, `sink_mass` the share of a sink; see `plugins.ops.normalizers`.
    """

    first: int
    weights: NDArray[np.float64]
    entropy: float
    sink_mass: float


def most_tokens(manifest: Manifest) -> int:
    """The longest sequence that is read, so that its queries and caches fit `MOST_BYTES`."""
    return min(MOST_TOKENS, manifest.max_context, max(1, MOST_BYTES // _bytes_per_token(manifest)))


def copied_bytes(folder: Path, manifest: Manifest) -> int:
    """At most so many bytes of weights are not pages of their file: quantized ones are packed, and 16 bits widened."""
    if manifest.quantization is None and manifest.dtype == "float32":
        return 0
    return 2 * sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _bytes_per_token(manifest: Manifest) -> int:
    queries = manifest.layers * manifest.q_heads * manifest.head_dim * 4
    return queries + sum(tensor.block_bytes for tensor in _tensors(manifest)) // manifest.cache.block_size


def _tensors(manifest: Manifest) -> tuple[CacheTensor, ...]:
    return cache_tensors(manifest.cache, manifest.layers, manifest.kv_heads, manifest.head_dim, manifest.value_dim)


class AttentionReader:
    """A second session of a model, with the queries of all layers as outputs. It keeps the last sequence."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        """Open the model of a folder, which was exported with a paged cache and has attention nodes.

        Raises:
            InputError: its graph is of another model, or cannot be loaded.
        """
        file = folder / manifest.model_file
        content = file.read_bytes()
        self._nodes = attention_nodes(content)
        if [node.layer for node in self._nodes] != list(range(manifest.layers)):
            raise InputError(f"{file.name} has {len(self._nodes)} attention nodes for {manifest.layers} layers")
        self._manifest = manifest
        self._session = _open(folder, manifest, showing(content, self._nodes), threads)
        block = manifest.cache.block_size
        self._blocks = -(-most_tokens(manifest) // block)
        # Memory that is never written is never taken from the system.
        kinds = {tensor: ELEMENTS[tensor.dtype] for tensor in _tensors(manifest)}
        self._caches = {
            tensor.name: page_memory.zeros((self._blocks, *tensor.block_shape), kind)
            for tensor, (kind, _) in kinds.items()
        }
        self._binding = self._session.io_binding()
        for tensor, (_, number) in kinds.items():  # in place, as our kernels update them
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(self._caches[tensor.name], number)
            self._binding.bind_ortvalue_input(tensor.name, value)
            self._binding.bind_ortvalue_output(tensor.updated_name, value)
        self._shown = [node.output(name) for node in self._nodes for name in node.inputs]
        self._parameters: dict[str, NDArray[Any]] = {}  # of the heads, by the names of the outputs
        self._tokens: list[int] = []
        self._queries: list[list[NDArray[np.float32]]] = []  # of each block of tokens, by layer

    def row(self, tokens: list[int], layer: int, head: int, position: int) -> AttentionRow:
        """The row of the query at `position` in a sequence of at most `most_tokens`; numbers are in range.

        What the sequence has in common with the last one is not computed again.
        """
        self._read(tokens)
        manifest, node = self._manifest, self._nodes[layer]
        first = 0 if node.window < 0 else max(0, position + 1 - node.window)
        kv_head = head // (manifest.q_heads // manifest.kv_heads)
        block, offset = divmod(position, manifest.cache.block_size)
        slopes, params = (self._parameters.get(node.output(name)) for name in ("alibi_slopes", "head_params"))
        slope, parameters = head_values(head, slopes, params)
        weights, statistics = row_weights(
            self._queries[block][layer][offset, head].astype(np.float64),
            self._keys(layer, kv_head, position + 1)[first:],
            np.arange(first, position + 1) - position,
            slope,
            parameters,
            normalizer=node.normalizer,
            scale=node.scale,
            softcap=node.softcap,
        )
        entropy = statistics.entropy + 0.0  # not -0.0
        return AttentionRow(first, weights, entropy, statistics.sink_mass)

    def _read(self, tokens: list[int]) -> None:
        block = self._manifest.cache.block_size
        pairs = zip(tokens, self._tokens, strict=False)
        differ = (at for at, (new, old) in enumerate(pairs) if new != old)
        same = next(differ, min(len(tokens), len(self._tokens)))
        if same == len(tokens):
            return
        kept = same // block * block  # an int8 block begins anew with its first token
        self._tokens, self._queries = self._tokens[:kept], self._queries[: kept // block]
        step = max(CHUNK // block, 1) * block
        for start in range(kept, len(tokens), step):
            chunk = tokens[start : start + step]
            self._compute(chunk, start)
            self._tokens += chunk

    def _compute(self, chunk: list[int], start: int) -> None:
        binding, count = self._binding, len(chunk)
        feeds = {
            "input_ids": np.array(chunk, np.int64),
            "positions": np.arange(start, start + count, dtype=np.int64),
            "slot_mapping": np.arange(start, start + count, dtype=np.int32),
            "block_table": np.arange(self._blocks, dtype=np.int32)[None],
            "query_start": np.array([0, count], np.int32),
            "context_lens": np.array([start], np.int32),
            "collect_stats": np.array(False),
            "logits_indices": np.array([count - 1]),
        }
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name in self._shown:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        shown = dict(zip(self._shown, binding.get_outputs()[len(self._caches) :], strict=True))  # as they were bound
        names = [node.output("query") for node in self._nodes]
        self._parameters = {name: value.numpy() for name, value in shown.items() if name not in names}
        queries = [shown[name].numpy() for name in names]  # each [count, q_heads, head_dim]
        block = self._manifest.cache.block_size
        self._queries += [[one[at : at + block] for one in queries] for at in range(0, count, block)]

    def _keys(self, layer: int, kv_head: int, count: int) -> NDArray[np.float64]:
        """The first keys of a head as kernels read them, [count, head_dim]."""
        cache, block = self._manifest.cache, self._manifest.cache.block_size
        blocks = -(-count // block)
        stored = self._caches[f"key_cache.{layer}"][:blocks, kv_head]  # [blocks, head_dim, block_size]
        if cache.dtype == "bfloat16":
            keys = (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        elif cache.dtype == "fp8":
            keys = e4m3.decode(stored).astype(np.float64)
        else:
            keys = stored.astype(np.float64)
        if cache.beside:
            keys *= self._caches[f"key_scale.{layer}"][:blocks, kv_head, None, None]
        return keys.transpose(0, 2, 1).reshape(-1, keys.shape[1])[:count]


def _open(folder: Path, manifest: Manifest, model: bytes, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    register_kernels(options)
    for name, value in {
        DATA_FOLDER: str(folder.resolve()),
        # Weights stay in the pages of their file, which the server has in memory anyway. Those of few bits are small,
        # and not packed they are multiplied otherwise.
        "session.disable_prepacking": "1" if manifest.quantization is None else "0",
        "session.intra_op.allow_spinning": "0",
    }.items():
        options.add_session_config_entry(name, value)
    try:
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no common exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].replace(str(folder), "the model")
        raise InputError(f"the model cannot be loaded a second time: {reason}") from error
