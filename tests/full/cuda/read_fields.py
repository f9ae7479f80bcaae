"""Parse a model with TensorRT-RTX's parser and plugin creators of our names, and print the first creator's fields.

`python -m tests.full.cuda.read_fields MODEL` runs in a process of its own, because TensorRT-RTX takes no plugins and
may abort at one.
"""

import json
import sys

import tensorrt_rtx_bindings as trt

from sharp.plugins.op.definition import ATTRIBUTES

TYPES = {"string": "CHAR", "float": "FLOAT32", "floats": "FLOAT32", "int": "INT32"}
FIELDS = {
    attribute.name: getattr(trt.PluginFieldType, TYPES[attribute.type]) for attribute in ATTRIBUTES if attribute.native
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
