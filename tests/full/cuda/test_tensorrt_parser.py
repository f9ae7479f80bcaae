"""TensorRT's parser takes our nodes as plugins and passes their attributes; TensorRT-RTX has the same parser."""

import json
import subprocess
import sys

import onnx
import pytest

from sharp.exporter.tensorrt.tensorrt import flag_as_int32
from sharp.plugins.op.schema import ATTENTION
from sharp.plugins.tensorrt.nodes import leave_to_plugin
from tests.full.cuda.native import ROOT
from tests.plugins.conformance import attention_cases
from tests.plugins.conformance.cases import Shape, make_case, make_model

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="the TensorRT-RTX bindings are not installed")


def read_fields(model, folder):
    """Return the fields that the parser gives to the first creator that it calls, and all output of the parser."""
    onnx.save(model, folder / "model.onnx")
    command = [sys.executable, "-m", "tests.full.cuda.read_fields", folder / "model.onnx"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = finished.stdout + finished.stderr
    given = [json.loads(line) for line in said.splitlines() if line.startswith('{"op"')]
    return given[0] if given else None, said


def attention_model(form, outputs=ATTENTION.output_names, **attributes):
    shape = attention_cases.Shape(form, past=16, head_dim=8, value_dim=8)
    return attention_cases.make_model(attention_cases.make_case("entmax", shape, **attributes), outputs)


@pytest.mark.parametrize("body", [False, True])
def test_the_fields_that_the_creator_is_given(tmp_path, body):
    model = make_model(make_case("adaptive_softmax", Shape(sequences=((3, 2),), head_dim=8, value_dim=8), window=5))
    # `sharp-export --target tensorrt` writes no body, because some parsers prefer a local function to a plugin
    if not body:
        del model.functions[:]
    given, said = read_fields(model, tmp_path)
    assert given, said
    assert given["op"] == "PagedAttention"
    node = model.graph.node[0]
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    # The plugin reads strings up to a zero at their end, and INT attributes as 32 bits.
    assert given["values"]["normalizer"] == attributes["normalizer"].decode() + "\0" == "adaptive_softmax\0"
    assert given["types"]["normalizer"] == "CHAR"
    assert given["values"]["window"] == [5] == [attributes["window"]] and given["types"]["window"] == "INT32"
    assert given["values"]["causal"] == [1] and given["types"]["causal"] == "INT32"
    assert given["values"]["stats_columns"] == [4] and given["types"]["stats_columns"] == "INT32"
    for name in ("scale", "alpha", "entropy_threshold", "softcap"):
        assert given["values"][name] == [pytest.approx(attributes[name])] and given["types"][name] == "FLOAT32"
    assert given["values"]["temperature_coefficients"] == pytest.approx(list(attributes["temperature_coefficients"]))


@pytest.mark.parametrize("body", [False, True])
@pytest.mark.parametrize("form", attention_cases.FORMS)
def test_the_interchange_op_becomes_the_plugin(tmp_path, form, body):
    # The parser refused soft caps when the op had the name of ONNX's own op.
    model = attention_model(form, softcap=4.0, alpha=1.25)
    if not body:
        del model.functions[:]
    given, said = read_fields(model, tmp_path)
    assert given, said
    assert given["op"] == "SharpAttention"
    assert given["values"]["normalizer"] == "entmax\0" and given["values"]["softcap"] == [4.0]


def test_what_the_build_gives_the_parser_becomes_the_plugin(tmp_path):
    model = attention_model("concatenating", ("output", "stats"))
    leave_to_plugin(model)
    flag_as_int32(model)
    assert [node.op_type for node in model.graph.node] == ["Cast", "SharpAttention"]
    given, said = read_fields(model, tmp_path)
    assert given and given["op"] == "SharpAttention", said


@pytest.mark.parametrize(("outputs", "taken"), [(ATTENTION.output_names, True), (("output", "stats"), False)])
def test_a_node_must_name_every_output(outputs, taken):
    """A node must name every output of its op.

    The test uses a local function, because TensorRT-RTX aborts at a plugin that exists.
    """
    model = attention_model("concatenating", outputs)
    for named in (*model.graph.node, *model.functions):
        setattr(named, "op_type" if isinstance(named, onnx.NodeProto) else "name", "Ours")
    network = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR)).create_network(0)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.INTERNAL_ERROR))
    assert parser.parse(model.SerializeToString()) == taken
    assert taken or "Node has more output tensors than TRT expected" in parser.get_error(0).desc()
