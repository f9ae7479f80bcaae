"""The kernels that an exported model needs, read from its graph."""

from pathlib import Path

import onnx

from sharp.core.errors import InputError
from sharp.core.manifest import Manifest, read_manifest
from sharp.plugins.cuda.kernel_set import BLOCK_SIZE
from sharp.plugins.op import schema
from sharp.plugins.op.attributes import SCALED_CACHES
from sharp.plugins.triton.options import Options, power_name

_SCREEN = schema.PAGED_ATTENTION.all_input_names.index("key_screen")
_OPS = {op.name: op.input_names.index("alibi_slopes") for op in schema.OPS}


def options_of_model(folder: Path) -> list[Options]:
    """Return the options of the calls that the model of an exported folder makes, each once, in the graph's order.

    Raises:
        NotFoundError: the folder is not a model folder.
        InputError: the folder is not valid, its attention is not an op of Sharp, its block size is no power of two, or
            a node has no normalizer.
    """
    manifest = read_manifest(folder)
    graph = onnx.load(folder / manifest.model_file, load_external_data=False).graph
    nodes = [node for node in graph.node if node.domain == schema.DOMAIN and node.op_type in _OPS]
    if not nodes:
        raise InputError(
            f"{folder} has no node of Sharp's attention and needs no kernels; export it without --target portable"
        )
    block_size = manifest.cache.block_size
    if block_size & (block_size - 1):
        raise InputError(
            f"{folder} has blocks of {block_size} keys, and kernels for GPUs need a power of two; "
            "export it with another --block-size"
        )
    return list(dict.fromkeys(_options(node, manifest) for node in nodes))


def _options(node: onnx.NodeProto, manifest: Manifest) -> Options:
    """Return the compile-time options of the kernels for one attention node of an exported model.

    Raises:
        InputError: the node has no attribute `normalizer`.
    """
    attributes = schema.ATTRIBUTE_DEFAULTS | {
        given.name: onnx.helper.get_attribute_value(given) for given in node.attribute
    }
    normalizer, alpha, softcap = (attributes.get(name) for name in ("normalizer", "alpha", "softcap"))
    if normalizer is None:
        raise InputError(f"node {node.name} has no attribute normalizer; export the model again")
    assert isinstance(normalizer, bytes) and isinstance(alpha, float) and isinstance(softcap, float)
    paged = node.op_type == schema.PAGED_ATTENTION.name
    slopes = node.input[place] if len(node.input) > (place := _OPS[node.op_type]) else ""
    # In exported models SharpAttention computes in float32, and so does PagedAttention over a cache without scales
    # whose type differs from the model's.
    dtype = manifest.dtype if paged and manifest.cache.dtype in (manifest.dtype, *SCALED_CACHES) else "float32"
    return Options(
        normalizer.decode(),
        dtype,
        manifest.cache.dtype if paged else dtype,
        manifest.head_dim,
        manifest.value_dim,
        manifest.cache.block_size if paged else BLOCK_SIZE,
        statistics=True,
        alibi=slopes not in ("", *schema.ABSENT.values()),
        softcap=softcap != 0,
        contiguous=not paged,
        power=power_name(alpha) if normalizer == b"entmax" else "",
        screened=paged and len(node.input) > _SCREEN and node.input[_SCREEN] != "",
    )
