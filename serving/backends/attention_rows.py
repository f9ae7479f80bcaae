"""`AttentionReader`: recomputes, on a CPU, the weights that one head gives to the tokens of a sequence.

No kernel writes attention weights. They are computed here by the op's float64 reference, one row at a time, from the
queries, which are extra outputs of the graph, and from the keys in the cache.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.plugins.cpu import page_memory
from sharp.plugins.cuda.kernel_library import register_kernels
from sharp.plugins.op import e4m3
from sharp.plugins.op.cache_tensors import ELEMENTS, CacheTensor, cache_tensors
from sharp.plugins.op.graph_attention import attention_nodes, showing
from sharp.plugins.op.reference import head_values, row_weights
from sharp.serving.api.errors import InputError
from sharp.serving.backends.weights import copied_model

CHUNK = 256  # tokens that are computed together, which limits the memory of activations
MOST_TOKENS = 4096
MOST_BYTES = 2**30  # memory limit for queries and caches
# ONNX Runtime's option for the folder of external data, needed because the model is given as bytes.
DATA_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class AttentionRow:
    """The weights float64 [n] that a query gives to the keys it sees, from position `first` on.

    `entropy` is the entropy of the weights in nats, `sink_mass` the share of a sink (see
    `sharp.plugins.op.normalizers`).
    """

    first: int
    weights: NDArray[np.float64]
    entropy: float
    sink_mass: float


def most_tokens(manifest: Manifest) -> int:
    """Return the length of the longest sequence that `AttentionReader` reads.

    The length is at most 4,096 and the model's context, and queries and caches of that length fit in 1 GiB
    (`MOST_BYTES`).
    """
    return min(MOST_TOKENS, manifest.max_context, max(1, MOST_BYTES // _bytes_per_token(manifest)))


def copied_bytes(folder: Path, manifest: Manifest) -> int:
    """Return an upper bound of the bytes of weights that ONNX Runtime copies instead of mapping their file.

    Quantized weights are packed, and weights of 16 bits are widened, into new memory.
    """
    if manifest.quantization is None and manifest.dtype == "float32":
        return 0
    return 2 * sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _bytes_per_token(manifest: Manifest) -> int:
    """Return the bytes of memory per token that an attention reader keeps: queries in float32, and the cache."""
    queries = manifest.layers * manifest.q_heads * manifest.head_dim * 4
    return queries + sum(tensor.block_bytes for tensor in _tensors(manifest)) // manifest.cache.block_size


def _tensors(manifest: Manifest) -> tuple[CacheTensor, ...]:
    """Return the descriptions of the model's cache tensors, layer by layer."""
    return cache_tensors(manifest.cache, manifest.layers, manifest.kv_heads, manifest.head_dim, manifest.value_dim)


class AttentionReader:
    """A second session of a model, whose outputs include the queries of all layers. Keeps the last sequence."""

    def __init__(
        self, folder: Path, manifest: Manifest, threads: int, *, copy: bool = False, verify: bool = True
    ) -> None:
        """Open the model of a folder, which was exported with a paged cache and has attention nodes.

        With `copy` the weights are read into memory (see `sharp.serving.backends.weights`), and with `verify` compared
        with their checksums. Without `copy` their file is mapped. ONNX Runtime's session has `threads` threads.

        Raises:
            InputError: the graph is of another model, has changed, or cannot be loaded.
        """
        file = folder / manifest.model_file
        copied = copied_model(folder, manifest, verify=verify) if copy else None
        content = file.read_bytes() if copied is None else copied.model
        self._nodes = attention_nodes(content)
        if [node.layer for node in self._nodes] != list(range(manifest.layers)):
            raise InputError(f"{file.name} has {len(self._nodes)} attention nodes for {manifest.layers} layers")
        self._manifest = manifest
        options = _session_options(folder, manifest, threads)
        if copied is not None:
            copied.add_to(options)
        self._session = _open(folder, showing(content, self._nodes), options)
        block = manifest.cache.block_size
        self._blocks = -(-most_tokens(manifest) // block)
        # Memory that is never written is never allocated by the system.
        kinds = {tensor: ELEMENTS[tensor.dtype] for tensor in _tensors(manifest)}
        self._caches = {
            tensor.name: page_memory.zeros((self._blocks, *tensor.block_shape), kind)
            for tensor, (kind, _) in kinds.items()
        }
        self._binding = self._session.io_binding()
        # one buffer for input and output, because Sharp's kernels update caches in place
        for tensor, (_, number) in kinds.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(self._caches[tensor.name], number)
            self._binding.bind_ortvalue_input(tensor.name, value)
            self._binding.bind_ortvalue_output(tensor.updated_name, value)
        self._shown = [node.output(name) for node in self._nodes for name in node.inputs]
        self._parameters: dict[str, NDArray[Any]] = {}  # parameters of the heads by output name
        self._tokens: list[int] = []
        self._queries: list[list[NDArray[np.float32]]] = []  # queries of each block of tokens, by layer

    def row(self, tokens: list[int], layer: int, head: int, position: int) -> AttentionRow:
        """Return the row of the query at `position` in a sequence of at most `most_tokens` tokens.

        Layers and query heads are counted from 0. The caller has checked the arguments. The prefix that `tokens` shares
        with the previous sequence is not computed again.
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
        entropy = statistics.entropy + 0.0  # turns -0.0 into 0.0
        return AttentionRow(first, weights, entropy, statistics.sink_mass)

    def _read(self, tokens: list[int]) -> None:
        """Compute queries and caches of `tokens`, reusing the blocks that the tokens read before have in common."""
        block = self._manifest.cache.block_size
        pairs = zip(tokens, self._tokens, strict=False)
        differ = (at for at, (new, old) in enumerate(pairs) if new != old)
        same = next(differ, min(len(tokens), len(self._tokens)))
        if same == len(tokens):
            return
        # whole blocks only, because the scale of an int8 block starts with its first token
        kept = same // block * block
        self._tokens, self._queries = self._tokens[:kept], self._queries[: kept // block]
        step = max(CHUNK // block, 1) * block
        for start in range(kept, len(tokens), step):
            chunk = tokens[start : start + step]
            self._compute(chunk, start)
            self._tokens += chunk

    def _compute(self, chunk: list[int], start: int) -> None:
        """Compute one chunk of tokens, whose first has the position `start`, and keep its queries."""
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
        # outputs are in the order of binding
        shown = dict(zip(self._shown, binding.get_outputs()[len(self._caches) :], strict=True))
        names = [node.output("query") for node in self._nodes]
        self._parameters = {name: value.numpy() for name, value in shown.items() if name not in names}
        queries = [shown[name].numpy() for name in names]  # each [count, q_heads, head_dim]
        block = self._manifest.cache.block_size
        self._queries += [[query[at : at + block] for query in queries] for at in range(0, count, block)]

    def _keys(self, layer: int, kv_head: int, count: int) -> NDArray[np.float64]:
        """Return the first `count` keys of a head as kernels read them, float64 [count, head_dim]."""
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


def _session_options(folder: Path, manifest: Manifest, threads: int) -> Any:
    """Return the options of a second ONNX Runtime session, which shares the weights' pages with the server.

    `threads` is the number of its threads.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    register_kernels(options)
    for name, value in {
        DATA_FOLDER: str(folder.resolve()),
        # Without packing, weights stay in the pages of their file, which the server has in memory anyway. Quantized
        # weights are small, and would be multiplied by other kernels if they were not packed.
        "session.disable_prepacking": "1" if manifest.quantization is None else "0",
        "session.intra_op.allow_spinning": "0",
    }.items():
        options.add_session_config_entry(name, value)
    return options


def _open(folder: Path, model: bytes, options: Any) -> Any:
    """Open a serialized model whose weights lie in `folder`, on the CPU. InputError if it cannot be loaded."""
    try:
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no common exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].replace(str(folder), "the model")
        raise InputError(f"the model cannot be loaded a second time: {reason}") from error
