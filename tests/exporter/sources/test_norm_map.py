"""`sharp-export --norm-map` gives layers and heads different norms."""

import json

import onnx
import pytest
from onnx import numpy_helper

from sharp import LLM, SamplingParams
from sharp.core.manifest import read_manifest
from sharp.exporter.forms.contiguous.session import ContiguousSession

MAP = """
[[norms]]
layers = [0]
heads = [0, 4, 5]
norm = "entmax"
alpha = 1.7

[[norms]]
layers = [1]
heads = [1]
norm = "ssmax"

[[norms]]
layers = [1]
heads = [4]
norm = "ssmax"
log_length_offset = 40

[[norms]]
layers = [1]
heads = [2, 3]
norm = "adaptive-temperature"
"""


@pytest.fixture
def norm_map(tmp_path):
    def write(text: str, name: str = "map.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.mark.full
def test_a_mapped_model_is_verified_and_served(checkpoint, sharp_export, norm_map, tmp_path):
    source, out = checkpoint("ssa", "nape", layers=2), tmp_path / "out"
    result = sharp_export(source, "--norm", "ssa", "--norm-map", norm_map(MAP), "--untrained-norm", "-o", out)
    assert result.exit_code == 0, result.output  # verified with kernels, and with overloads of the function body
    assert "ssa and map.toml" in result.output
    manifest = read_manifest(out)
    assert (manifest.norm.name, manifest.norm.trained) == ("ssa", False)
    named = [(head.layer, head.heads, head.name, head.normalizer, head.alpha) for head in manifest.norm.heads]
    assert named == [
        (0, (0, 4, 5), "entmax", "entmax", 1.7),
        (1, (1,), "ssmax", "softmax", 1.5),
        (1, (4,), "ssmax", "softmax", 1.5),
        (1, (2, 3), "adaptive-temperature", "adaptive_softmax", 1.5),
    ]
    # The other heads keep their learned parameters.
    assert [(parameter.name, parameter.value, parameter.origin) for parameter in manifest.norm.parameters] == [
        ("b", None, "checkpoint"),
        ("n", None, "checkpoint"),
    ]
    assert "layer 0, heads 0, 4, 5: entmax, alpha 1.7" in " ".join(result.output.split())
    offsets = [
        parameter.value
        for head in manifest.norm.heads
        for parameter in head.parameters
        if parameter.name == "log_length_offset"
    ]
    assert offsets == [2, 40]
    # Query heads 0-2 read KV head 0, and query heads 3-5 KV head 1. Each cache belongs to one norm and one number of
    # query heads.
    assert manifest.cache.heads == (1, 1, 1, 1, 2, 2, 2)
    (completion,) = LLM(out).generate([[5, 17, 30]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(completion.token_ids) == 8


def test_heads_that_differ_in_b_and_n_only_are_one_node(checkpoint, sharp_export, norm_map, tmp_path):
    text = "\n".join(f"[[norms]]\nheads = [{head}]\nnorm = 'ssa'\nssa_b = {0.5 + head}" for head in range(5))
    options = ("--norm", "ssa", "--norm-map", norm_map(text), "--untrained-norm")
    result = sharp_export(checkpoint("ssa"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    model = onnx.load(tmp_path / "out" / "model.onnx")
    (node,) = [node for node in model.graph.node if node.domain == "ai.sharp"]
    (params,) = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name == node.input[9]]
    assert params[:5, 0].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]


@pytest.mark.full
def test_norms_with_constants_stand_beside_learned_ones(checkpoint, sharp_export, norm_map, tmp_path):
    norms = (("sigmoid", 0), ("sigmoid-n", 1), ("relu-n", 2), ("relu", 3))
    text = "\n".join(f"[[norms]]\nheads = [{head}]\nnorm = '{norm}'" for norm, head in norms)
    options = ("--norm", "ssa", "--norm-map", norm_map(text), "--untrained-norm")
    result = sharp_export(checkpoint("ssa"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    model = onnx.load(tmp_path / "out" / "model.onnx")
    arrays = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.data_location == 0
    }
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    found = [
        arrays[node.input[9]].tolist() if len(node.input) > 9 and node.input[9] in arrays else None for node in nodes
    ]
    assert [params for params in found if params is not None and len(params) == 1] == [[[0, 1]], [[1]]]


def test_other_forms_and_json(checkpoint, sharp_export, norm_map, tmp_path):
    source, out = checkpoint("softmax", layers=2), tmp_path / "out"
    mapped = norm_map(json.dumps({"norms": [{"layers": [1], "norm": "ssa", "ssa_b": 0.7}]}), "map.json")
    options = ("--norm", "softmax", "--norm-map", mapped, "--untrained-norm", "--cache", "contiguous")
    result = sharp_export(source, *options, "--target", "portable", "-o", out)
    assert result.exit_code == 0, result.output
    assert len(ContiguousSession(out, kernels=False).past_shapes) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[norms]]\nlayers = [2]\nnorm = 'ssa'", "entry 0: there is no layer 2; the model has 2, from 0"),
        ("[[norms]]\nheads = [6]\nnorm = 'ssa'", "entry 0: there is no head 6; the model has 6, from 0"),
        ("[[norms]]\nnorm = 'ssa'\n[[norms]]\nlayers = [0]\nnorm = 'relu'", "layer 0, head 0 has a norm from entry 0"),
        ("[[norms]]\nnorm = 'ssa'\nalpha = 2.0", "entry 0: --alpha is for the norms"),
        ("[[norms]]\nnorm = 'entmax'\nalpha = 0.5", "entry 0: --alpha is 0.5"),
        ("[[norms]]\nnorm = 'asentmax'", "entry 0: norm asentmax learns its scale in training"),
        ("[[norms]]\nnorm = 'fixed-temperature'", "entry 0: fixed-temperature needs a temperature"),
        ("[[norms]]\nnorm = 'soft'", "entry 0: norm 'soft' is not known"),
        ("[[norms]]\nname = 'ssa'", "is not valid: norms.0.norm: Field required"),
        ("norms = ", "is not valid: "),
    ],
)
def test_a_map_that_cannot_work_is_refused_in_one_sentence(checkpoint, sharp_export, norm_map, tmp_path, text, message):
    options = ("--norm", "softmax", "--norm-map", norm_map(text), "--untrained-norm", "--dry-run")
    result = sharp_export(checkpoint("softmax", layers=2), *options, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_an_untrained_map_must_be_allowed(checkpoint, sharp_export, norm_map, tmp_path):
    source = checkpoint("softmax", layers=2)
    result = sharp_export(source, "--norm", "softmax", "--norm-map", norm_map(MAP), "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "pass --untrained-norm" in " ".join(result.output.split())
