"""Records of an exported model folder, whose ONNX graph gets the inputs of its attention nodes as more outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from sharp.core.errors import InputError
from sharp.core.manifest import Manifest, read_manifest
from sharp.exporter.inspection.attention_nodes import SHOWN, InspectedNode, attention_nodes
from sharp.exporter.inspection.prompt import read_tokenizer
from sharp.exporter.inspection.recording import (
    INVERSE_TEMPERATURE,
    Floats,
    Inputs,
    InspectedModel,
    LayerRecord,
    Projections,
)
from sharp.exporter.inspection.set_record import QUERY, set_record
from sharp.models.norms import NORMS
from sharp.plugins.cuda.kernel_library import register_kernels
from sharp.plugins.op.cache_tensors import cache_tensors
from sharp.plugins.op.schema import (
    ATTENTION,
    PAGED_ATTENTION,
    OpDefinition,
)

# ONNX Runtime's setting for the folder of external data, when the model is given as bytes.
DATA_FOLDER = "session.model_external_initializers_file_folder_path"


def open_folder(path: Path) -> InspectedModel:
    """Open the model of a folder; its graph is read only when it is recorded.

    Raises:
        NotFoundError: the folder does not exist, or has no manifest.
        InputError: the manifest is not valid, a file is missing or damaged, or the tokenizer cannot be read.
    """
    manifest = read_manifest(path)
    return InspectedModel(
        name=manifest.name,
        norm=manifest.norm.name,
        layers=manifest.layers,
        q_heads=manifest.q_heads,
        vocab_size=manifest.vocab_size,
        max_context=manifest.max_context,
        trained_context=manifest.trained_context,
        tokenizer=None if manifest.tokenizer.file is None else read_tokenizer(path / manifest.tokenizer.file),
        record=lambda inputs: record_folder(path, manifest, inputs),
        numbers_of_item=numbers_of_item(manifest),
    )


def numbers_of_item(manifest: Manifest) -> int | None:
    """Return the width of a set's items, 0 for a model that reads numbers, None for a model that reads tokens."""
    if manifest.kind == "set" and manifest.inputs and isinstance(width := manifest.inputs[0].shape[-1], int):
        return width
    return 0 if manifest.kind == "numbers" else None


def record_folder(path: Path, manifest: Manifest, inputs: Inputs) -> tuple[LayerRecord, ...]:
    """Run the model of a folder over one sequence or set, with Sharp's kernels, and return a record per layer.

    `inputs` are token ids int64 [tokens], numbers float32 [tokens], or the items float32 [items, width] of a set.

    Raises:
        InputError: the model has a cache form that cannot be recorded, Sharp's CPU kernels cannot run it, or its graph
            does not fit its manifest.
    """
    causal = manifest.kind in ("decoder", "numbers")
    if manifest.cache.form != "paged" and not (manifest.cache.form == "none" and (causal or manifest.kind == "set")):
        raise InputError(
            f"{path} was exported with --cache {manifest.cache.form}, and sharp inspect reads the paged form; inspect "
            "the checkpoint that it was made from, or export that with --cache paged"
        )
    if manifest.target == "portable" or manifest.dtype == "bfloat16":
        given = "--target portable" if manifest.target == "portable" else "--dtype bfloat16"
        raise InputError(
            f"{path} was exported with {given}, and sharp inspect runs Sharp's kernels on a CPU; inspect the "
            "checkpoint that it was made from, or export that without it"
        )
    file = path / manifest.model_file
    op = PAGED_ATTENTION if manifest.cache.form == "paged" else ATTENTION
    model, nodes = read_graph(file, op)
    if manifest.cache.heads or manifest.norm.heads:
        raise InputError(
            f"{file} has several norms in a layer, which sharp inspect does not show; inspect the checkpoint instead"
        )
    if [node.layer for node in nodes] != list(range(manifest.layers)):
        raise InputError(
            f"{file} has {len(nodes)} {op.name} nodes for {manifest.layers} layers; "
            f"export the model again with sharp-export (with --cache {manifest.cache.form})"
        )
    added = {output: value for node in nodes for output, value in node.added_outputs().items()}
    for output, value in added.items():
        model.graph.node.append(helper.make_node("Identity", [value], [output]))
        model.graph.output.append(helper.make_empty_tensor_value_info(output))
    if manifest.kind == "set":
        with _readable(file):
            return (_set_record(nodes[0], model, path, manifest, inputs),)
    names = ["stats", *added]
    with _readable(file):
        found = dict(zip(names, _run(model, path, manifest, names, inputs), strict=True))
    if op is ATTENTION:
        found = {name: _of_one_sequence(name, values) for name, values in found.items()}
    factors = found["stats"][..., INVERSE_TEMPERATURE]  # [layers, tokens, q_heads]
    norm = NORMS.get(manifest.norm.name)  # None for norms of users
    # Statistics of earlier exports do not include the length scale: the factor is 1 everywhere.
    scaled = norm is not None and norm.scale_kind != "none" and bool((factors != 1).any())
    records = (_layer_record(node, model, path, found) for node in nodes)
    return tuple(
        replace(record, length_scale=factors[layer] if scaled else None) for layer, record in enumerate(records)
    )


def read_graph(file: Path, op: OpDefinition) -> tuple[onnx.ModelProto, list[InspectedNode]]:
    """Read the graph of a folder without its external weights, and its nodes of `op`, in the order of the layers.

    Raises:
        InputError: the file is no graph that `sharp-export` has written.
    """
    with _readable(file):
        model = onnx.load(file, load_external_data=False)
        return model, list(attention_nodes(model, op))


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn all errors inside the context into an InputError that says that `file` is damaged; keep InputErrors.

    Errors of protobuf, onnx and ONNX Runtime have no common class.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise InputError(f"{file} is damaged, or not a graph of sharp-export: {reason}; export it again") from error


def _of_one_sequence(name: str, values: Floats) -> Floats:
    """Bring values of a batch of one to the layout of the paged form, which has no batch and tokens before heads.

    Queries and keys are [batch, heads, tokens, dim], statistics [layers, batch, heads, tokens, 4]; other values stay.
    """
    if name == "stats":
        return values[:, 0].swapaxes(1, 2)
    return values[0].swapaxes(0, 1) if name.endswith((".query", ".key")) else values


def _set_record(
    node: InspectedNode, model: onnx.ModelProto, path: Path, manifest: Manifest, items: Inputs
) -> LayerRecord:
    """Return the `set_record` of a model of sets, without a length scale; `items` are [items, width].

    The query for each n comes from a run over the first n items. `model` has the added outputs of `node`.
    """
    name = f"inspect.{node.layer}."

    def session(output: str) -> onnxruntime.InferenceSession:
        """Open the model with this output only."""
        only = onnx.ModelProto()
        only.CopyFrom(model)
        kept = [value for value in only.graph.output if value.name == output]
        del only.graph.output[:]
        only.graph.output.extend(kept)
        return _open(only, path, manifest)

    def run(opened: onnxruntime.InferenceSession, output: str, count: int) -> Floats:
        """Return the output for the first `count` items of the set."""
        given = {"items": items[None, :count], "query": np.full((1, 1), QUERY, np.float32)}
        read = {value.name for value in opened.get_inputs()}
        (values,) = opened.run([output], {name: array for name, array in given.items() if name in read})
        return np.asarray(values)

    of_query = session(f"{name}query")
    counts = range(1, len(items) + 1)
    queries = [run(of_query, f"{name}query", count)[0, :, 0] for count in counts]  # each [1 head, head_dim]
    key = run(session(f"{name}key"), f"{name}key", len(items))[0].swapaxes(0, 1)
    params = None
    if "head_params" in node.inputs:
        params = run(session(f"{name}head_params"), f"{name}head_params", 1)
    return set_record(np.stack(queries), key, params, node.normalizer, node.attributes["scale"], None)


def _open(model: onnx.ModelProto, path: Path, manifest: Manifest) -> onnxruntime.InferenceSession:
    """Load the model, whose weights lie in folder `path`, in ONNX Runtime on the CPU.

    InputError if it cannot be loaded.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    register_kernels(options)
    options.add_session_config_entry(DATA_FOLDER, str(path.resolve()))
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no common exception
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path / manifest.model_file} cannot be loaded: {reason}; export the model again") from error


def _run(model: onnx.ModelProto, path: Path, manifest: Manifest, names: list[str], inputs: Inputs) -> list[Floats]:
    """Run all of `inputs` as one prompt and return the outputs `names`, in their order."""
    session = _open(model, path, manifest)
    if manifest.cache.form == "none":
        given = {manifest.inputs[0].name: inputs[None], "collect_stats": np.array(True)}
        return [np.asarray(output) for output in session.run(names, given)]
    tokens, block = len(inputs), manifest.cache.block_size
    blocks = -(-tokens // block)
    tensors = cache_tensors(manifest.cache, manifest.layers, manifest.kv_heads, manifest.head_dim, manifest.value_dim)
    feeds = {
        "input_ids": inputs,
        "positions": np.arange(tokens, dtype=np.int64),
        "slot_mapping": np.arange(tokens, dtype=np.int32),
        "block_table": np.arange(blocks, dtype=np.int32)[None],
        "query_start": np.array([0, tokens], np.int32),
        "context_lens": np.zeros(1, np.int32),
        "collect_stats": np.array(True),
        "logits_indices": np.array([tokens - 1]),
    }
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    caches = {tensor.name: tensor.make(blocks) for tensor in tensors}
    return [output.numpy() for output in session.run_with_ort_values(names, values | caches)]


def _layer_record(node: InspectedNode, model: onnx.ModelProto, path: Path, found: dict[str, Floats]) -> LayerRecord:
    """Return one layer's query, key, normalizer and statistics from the outputs `found`, by name."""
    given = {name: found.get(f"inspect.{node.layer}.{name}") for name in SHOWN}
    query, key = given["query"], given["key"]
    assert query is not None
    assert key is not None
    attributes = node.attributes
    return LayerRecord(
        query=query,
        key=key,
        head_params=given["head_params"],
        alibi_slopes=given["alibi_slopes"],
        normalizer=node.normalizer,
        scale=attributes["scale"],
        softcap=attributes["softcap"],
        window=attributes["window"],
        projections=_projections(node, model, path, found, (query.shape[1], key.shape[1])),
        stats=found["stats"][node.layer],
    )


def _projections(
    node: InspectedNode, model: onnx.ModelProto, path: Path, found: dict[str, Floats], heads: tuple[int, int]
) -> Projections | None:
    """Return hidden states [tokens, hidden_size], and query and key weights [heads, head_dim, hidden_size], of a layer.

    `heads` are the numbers of query and KV heads. Return None if the graph has no separate projections. `found` are the
    run's outputs by name.
    """
    if node.projections is None:
        return None
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    matrices = [
        numpy_helper.to_array(weights[part.weight], str(path))[:, part.start : part.stop].T for part in node.projections
    ]
    hidden = found[f"inspect.{node.layer}.hidden"]
    hidden = hidden.reshape(-1, hidden.shape[-1])  # [tokens, hidden_size]
    head_dim = found[f"inspect.{node.layer}.query"].shape[-1]
    if [len(matrix) for matrix in matrices] != [count * head_dim for count in heads]:
        return None  # one matrix makes several of query, key and value
    query_weight, key_weight = (matrix.reshape(-1, head_dim, matrix.shape[1]) for matrix in matrices)
    return Projections(hidden, query_weight, key_weight)
