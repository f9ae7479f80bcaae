"""TensorRT's parser takes our nodes for the plugin and hands it their attributes; TensorRT-RTX has the same parser."""

import json
import subprocess
import sys

import onnx
import pytest

from tests.conformance.cases import Shape, make_case, make_model
from tests.cuda.native import ROOT

pytest.importorskip("tensorrt_rtx_bindings", reason="the TensorRT-RTX bindings are not installed")


@pytest.mark.parametrize("body", [False, True])
def test_the_fields_that_the_creator_is_given(tmp_path, body):
    model = make_model(make_case("adaptive_softmax", Shape(sequences=((3, 2),), head_dim=8, value_dim=8), window=5))
    if not body:  # as `sharp-export --target tensorrt` writes it, for parsers that look for a local function first
        del model.functions[:]
    onnx.save(model, tmp_path / "model.onnx")
    finished = subprocess.run(
        [sys.executable, "-m", "tests.cuda.read_fields", tmp_path / "model.onnx"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.stdout, finished.stderr
    given = json.loads(finished.stdout.splitlines()[0])
    node = model.graph.node[0]
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    # The plugin's reader counts on the zero at the end of a string, and on INT attributes as 32 bits.
    assert given["values"]["normalizer"] == attributes["normalizer"].decode() + "\0" == "adaptive_softmax\0"
    assert given["types"]["normalizer"] == "CHAR"
    assert given["values"]["window"] == [5] == [attributes["window"]] and given["types"]["window"] == "INT32"
    assert given["values"]["causal"] == [1] and given["types"]["causal"] == "INT32"
    for name in ("scale", "alpha", "entropy_threshold", "softcap"):
        assert given["values"][name] == [pytest.approx(attributes[name])] and given["types"][name] == "FLOAT32"
    assert given["values"]["temperature_coefficients"] == pytest.approx(list(attributes["temperature_coefficients"]))
