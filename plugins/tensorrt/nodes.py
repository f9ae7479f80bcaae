"""The conversion of attention nodes, so that TensorRT's parser takes Sharp's plugins for them."""

import onnx

from sharp.plugins.op import schema
from sharp.plugins.op.function_body import complete_inputs, given_inputs

SCALED_VERSION, SCREENED_VERSION = b"2", b"3"
"""Versions of the plugin for caches with scales or a key screen; `paged_attention_plugin.h` says why they differ."""


def leave_to_plugin(model: onnx.ModelProto) -> None:
    """Change the attention nodes of `model`, in place, so that TensorRT's parser takes Sharp's plugin for them.

    Older parsers prefer a local function over a plugin, so all functions of the model are removed. All parsers refuse a
    node that names fewer outputs than its plugin has, so unused outputs get names. Nodes of PagedAttention with scales
    or a key screen get another `plugin_version`, and an empty tensor for each input that is left out before a given
    one.
    """
    del model.functions[:]
    for node in model.graph.node:
        if (node.domain, node.op_type) == (schema.DOMAIN, schema.ATTENTION.name):
            _name_outputs(node, schema.ATTENTION.output_names)
        elif (node.domain, node.op_type) == (schema.DOMAIN, schema.PAGED_ATTENTION.name):
            given = given_inputs(node)
            names = schema.PAGED_ATTENTION.all_input_names
            last = max((names.index(name) for name in given), default=0)
            complete_inputs(model.graph, node, names[: max(last + 1, schema.PAGED_ATTENTION.required_inputs)])
            if {*schema.SCALES} & {*given}:
                _name_outputs(node, (*schema.OUTPUTS, *(f"{name}_out" for name in schema.SCALES)))
                _set_version(node, SCALED_VERSION)
            elif "key_screen" in given:
                del node.output[len(schema.OUTPUTS) : -1]  # remove the outputs of scales
                _name_outputs(node, (*schema.OUTPUTS, "key_screen_out"))
                _set_version(node, SCREENED_VERSION)


def _name_outputs(node: onnx.NodeProto, names: tuple[str, ...]) -> None:
    """Give the node all outputs of `names` in order; a missing one is called after the first, as "output.stats".

    The node's present outputs are the first of `names`.
    """
    named = dict(zip(names, node.output, strict=False))
    outputs = [named.get(name) or f"{node.output[0]}.{name}" for name in names]
    del node.output[:]
    node.output.extend(outputs)


def _set_version(node: onnx.NodeProto, version: bytes) -> None:
    """Set the node's attribute `plugin_version`, in place of an earlier value."""
    kept = [attribute for attribute in node.attribute if attribute.name != "plugin_version"]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute("plugin_version", version)])
