"""Recording an exported model folder: its ONNX graph, with what the attention nodes are given as outputs too."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from sharp.exporter.inspection.prompt import read_tokenizer
from sharp.exporter.inspection.recording import (
    INVERSE_TEMPERATURE,
    Floats,
    InspectedModel,
    LayerRecord,
    Projections,
    Tokens,
)
from sharp.models.norms import NORMS
from sharp.plugins.cache_tensors import cache_tensors
from sharp.plugins.errors import InputError
from sharp.plugins.kernel_library import register_kernels
from sharp.plugins.manifest import Manifest, read_manifest
from sharp.plugins.ops.normalizers import Normalizer
from sharp.plugins.ops.schema import ABSENT, ATTRIBUTE_DEFAULTS, DOMAIN, INPUTS, PAGED_ATTENTION

# Inputs of the attention nodes that become outputs of the model.
SHOWN: tuple[str, ...] = ("query", "key", "head_params", "alibi_slopes")
# ONNX Runtime's name for: the folder of external data, for a model that is given as bytes.
DATA_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class _Product:
    """Some columns, from `start` to before `stop`, of the product of `activations` with an initializer."""

    activations: str
    weight: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Attention:
    """An attention node: the names of its inputs and of the block's input, and the products that make Q and K."""

    layer: int
    inputs: dict[str, str]
    attributes: dict[str, Any]
    projections: tuple[_Product, _Product] | None

    def added_outputs(self) -> dict[str, str]:
        """Value -> the name of the output that shows it."""
        shown = {name: self.inputs[name] for name in SHOWN if name in self.inputs}
        if self.projections is not None:
            shown["hidden"] = self.projections[0].activations
        return {f"inspect.{self.layer}.{name}": value for name, value in shown.items()}


def open_folder(path: Path) -> InspectedModel:
    """The model of a folder; the graph is read when it is recorded.

    Raises:
        InputError, NotFoundError: it is not a model folder, or an incomplete one.
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
        record=lambda token_ids: record_folder(path, manifest, token_ids),
    )


def record_folder(path: Path, manifest: Manifest, token_ids: Tokens) -> tuple[LayerRecord, ...]:
    """Run the model of a folder over one sequence, with Sharp's kernels.

    Raises:
        InputError: it is not of the paged form, has nothing for Sharp's kernels, or its graph is not of this model.
    """
    if manifest.cache.form != "paged":
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
    model = onnx.load(file, load_external_data=False)
    nodes = list(_attention_nodes(model))
    if manifest.cache.heads:
        raise InputError(f"{file} has several norms in a layer, which sharp inspect does not show yet")
    if [node.layer for node in nodes] != list(range(manifest.layers)):
        raise InputError(
            f"{file} has {len(nodes)} {PAGED_ATTENTION.name} nodes for {manifest.layers} layers; "
            "export the model again with sharp-export (in its paged form)"
        )
    added = {output: value for node in nodes for output, value in node.added_outputs().items()}
    for output, value in added.items():
        model.graph.node.append(helper.make_node("Identity", [value], [output]))
        model.graph.output.append(helper.make_empty_tensor_value_info(output))
    names = ["stats", *added]
    found = dict(zip(names, _run(model, path, manifest, names, token_ids), strict=True))
    factors = found["stats"][..., INVERSE_TEMPERATURE]  # [layers, tokens, q_heads]
    norm = NORMS.get(manifest.norm.name)  # not of users' own
    # Folders of earlier exports have 1 everywhere.
    scaled = norm is not None and norm.scale_kind != "none" and bool((factors != 1).any())
    records = (_layer_record(node, model, path, found) for node in nodes)
    return tuple(replace(one, length_scale=factors[layer] if scaled else None) for layer, one in enumerate(records))


def _attention_nodes(model: onnx.ModelProto) -> Iterator[_Attention]:
    """In the order of the layers."""
    producers = {output: node for node in model.graph.node for output in node.output}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if (node.domain, node.op_type) != (DOMAIN, PAGED_ATTENTION.name):
            continue
        inputs = {
            name: value
            for name, value in zip(INPUTS, node.input, strict=False)
            if value and value not in ABSENT.values()
        }
        query, key = (_projection(inputs[name], producers, weights) for name in ("query", "key"))
        same = query is not None and key is not None and query.activations == key.activations
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        found.append(
            _Attention(
                layer=int(inputs["key_cache"].rpartition(".")[2]),
                inputs=inputs,
                attributes={**ATTRIBUTE_DEFAULTS, **given},
                projections=(query, key) if query is not None and key is not None and same else None,
            )
        )
    yield from sorted(found, key=lambda node: node.layer)


def _projection(
    value: str, producers: dict[str, onnx.NodeProto], weights: dict[str, onnx.TensorProto]
) -> _Product | None:
    """The product that `value` was made from, the widest if a length scale has one too."""
    products, open_values, seen = [], [value], set()
    while open_values:
        value = open_values.pop()
        node = producers.get(value)
        if node is None or value in seen:
            continue
        seen.add(value)
        product = _columns(value, node, producers, weights)
        if product is not None:
            products.append(product)
        elif node.op_type != "MatMul":
            open_values.extend(node.input)
    return max(products, key=lambda product: product.stop - product.start, default=None)


def _columns(
    value: str, node: onnx.NodeProto, producers: dict[str, onnx.NodeProto], weights: dict[str, onnx.TensorProto]
) -> _Product | None:
    """`value` as a product with a matrix, or as a part of one that the exporter made of several, or else None."""
    sizes, part = [], 0
    if node.op_type == "Split" and len(node.input) == 2 and node.input[1] in weights:
        sizes, part = numpy_helper.to_array(weights[node.input[1]]).tolist(), list(node.output).index(value)
        node = producers.get(node.input[0], node)
    matrix = weights.get(node.input[1]) if node.op_type == "MatMul" else None
    if matrix is None or len(matrix.dims) != 2:
        return None
    start, width = (sum(sizes[:part]), sizes[part]) if sizes else (0, matrix.dims[1])
    return _Product(node.input[0], node.input[1], start, start + width)


def _run(model: onnx.ModelProto, path: Path, manifest: Manifest, names: list[str], token_ids: Tokens) -> list[Floats]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    register_kernels(options)
    options.add_session_config_entry(DATA_FOLDER, str(path.resolve()))
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no common exception
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path / manifest.model_file} cannot be loaded: {reason}; export the model again") from error
    tokens, block = len(token_ids), manifest.cache.block_size
    blocks = -(-tokens // block)
    tensors = cache_tensors(manifest.cache, manifest.layers, manifest.kv_heads, manifest.head_dim, manifest.value_dim)
    feeds = {
        "input_ids": token_ids,
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


def _layer_record(node: _Attention, model: onnx.ModelProto, path: Path, found: dict[str, Floats]) -> LayerRecord:
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
        normalizer=Normalizer(
            attributes["normalizer"].decode(),
            attributes["alpha"],
            tuple(attributes["temperature_coefficients"]),
            attributes["entropy_threshold"],
        ),
        scale=attributes["scale"],
        softcap=attributes["softcap"],
        window=attributes["window"],
        projections=_projections(node, model, path, found, (query.shape[1], key.shape[1])),
        stats=found["stats"][node.layer],
    )


def _projections(
    node: _Attention, model: onnx.ModelProto, path: Path, found: dict[str, Floats], heads: tuple[int, int]
) -> Projections | None:
    if node.projections is None:
        return None
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    matrices = [
        numpy_helper.to_array(weights[one.weight], str(path))[:, one.start : one.stop].T for one in node.projections
    ]
    hidden = found[f"inspect.{node.layer}.hidden"]
    hidden = hidden.reshape(-1, hidden.shape[-1])  # [tokens, hidden_size]
    head_dim = found[f"inspect.{node.layer}.query"].shape[-1]
    if [len(matrix) for matrix in matrices] != [count * head_dim for count in heads]:
        return None  # a matrix for several of query, key and value
    query_weight, key_weight = (matrix.reshape(-1, head_dim, matrix.shape[1]) for matrix in matrices)
    return Projections(hidden, query_weight, key_weight)
