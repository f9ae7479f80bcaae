"""Parses a model with TensorRT-RTX's parser and plugin creators of our names; prints what the first one is given.

python -m tests.full.cuda.read_fields MODEL. In a process of its own: TensorRT-RTX takes no plugins, and may abort at
one.
"""

import json
import sys

import tensorrt_rtx_bindings as trt

FIELDS = {
    "normalizer": trt.PluginFieldType.CHAR,
    "scale": trt.PluginFieldType.FLOAT32,
    "alpha": trt.PluginFieldType.FLOAT32,
    "temperature_coefficients": trt.PluginFieldType.FLOAT32,
    "entropy_threshold": trt.PluginFieldType.FLOAT32,
    "softcap": trt.PluginFieldType.FLOAT32,
    "window": trt.PluginFieldType.INT32,
    "causal": trt.PluginFieldType.INT32,
    "stats_columns": trt.PluginFieldType.INT32,
}


class Creator(trt.IPluginCreatorV3One):
    def __init__(self, name, version):
        trt.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_namespace, self.plugin_version = name, "", version
        self.field_names = trt.PluginFieldCollection([trt.PluginField(name, b"", FIELDS[name]) for name in FIELDS])

    def create_plugin(self, name, fields, _phase):
        found = {
            field.name: (bytes(field.data).decode() if field.type == trt.PluginFieldType.CHAR else field.data.tolist())
            for field in fields
        }
        types = {field.name: field.type.name for field in fields}
        print(
            json.dumps(
                {"op": self.name, "version": self.plugin_version, "node": name, "types": types, "values": found}
            ),
            flush=True,
        )


creators = [
    Creator("PagedAttention", "1"),
    Creator("PagedAttention", "2"),
    Creator("PagedAttention", "3"),
    Creator("SharpAttention", "1"),
]
assert all(trt.get_plugin_registry().register_creator(creator, "") for creator in creators)
logger = trt.Logger(trt.Logger.ERROR)
network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, logger)
parser.parse_from_file(sys.argv[1])
