"""`sharp-export --temperature` and `--temperature-coefficients`."""

import json
from dataclasses import replace

import onnx
import pytest

from sharp.models.checkpoint import save_checkpoint
from sharp.plugins.op.schema import TEMPERATURE_PRESETS
from tests.exporter.conftest import tiny_model

FITTED = [0.01, -0.2, 1.5]


def preset(path, **changes):
    content = {
        "temperature_coefficients": FITTED,
        "entropy_threshold": 0.25,
        "entropy_range": [0.5, 4.0],
        "source": "a test",
        "data": "none",
        "date": "2026-11-21",
        "samples": 10,
    }
    path.write_text(json.dumps(content | changes))
    return path


def attention_attributes(folder):
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    return [
        {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute} for node in nodes
    ]


def test_a_fitted_polynomial_becomes_the_models(checkpoint, sharp_export, tmp_path):
    source, out = checkpoint("adaptive-temperature"), tmp_path / "out"
    options = ("--norm", "adaptive-temperature", "--temperature-coefficients", preset(tmp_path / "fit.json"))
    result = sharp_export(source, *options, "-o", out)
    assert result.exit_code == 0, result.output
    norm = json.loads((out / "sharp.json").read_text())["norm"]
    assert norm["temperature_coefficients"] == FITTED
    assert norm["entropy_threshold"] == 0.25
    for attributes in attention_attributes(out):
        assert attributes["temperature_coefficients"] == pytest.approx(FITTED)
        assert attributes["entropy_threshold"] == 0.25


def test_a_published_polynomial_goes_by_its_name(checkpoint, sharp_export, tmp_path):
    source, out = checkpoint("softmax"), tmp_path / "out"
    options = ("--norm", "adaptive-temperature", "--temperature-coefficients", "arxiv2024", "--untrained-norm")
    result = sharp_export(source, *options, "-o", out)
    assert result.exit_code == 0, result.output
    norm = json.loads((out / "sharp.json").read_text())["norm"]
    assert norm["temperature_coefficients"] == list(TEMPERATURE_PRESETS["arxiv2024"])


def test_a_fixed_temperature_is_part_of_the_scale(sharp_export, tmp_path):
    source, out = tmp_path / "cold.safetensors", tmp_path / "out"
    save_checkpoint(source, tiny_model("fixed-temperature", temperature=0.25))
    result = sharp_export(source, "--norm", "fixed-temperature", "-o", out)
    assert result.exit_code == 0, result.output  # the export is verified against PyTorch
    for attributes in attention_attributes(out):
        assert attributes["normalizer"] == b"softmax"
        assert attributes["scale"] == pytest.approx(4 * 8**-0.5)
    assert json.loads((out / "sharp.json").read_text())["norm"]["temperature"] == 0.25


def test_a_softmax_model_can_be_exported_with_a_fixed_temperature(checkpoint, sharp_export, tmp_path):
    source, out = checkpoint("softmax"), tmp_path / "out"
    result = sharp_export(source, "--norm", "fixed-temperature", "--temperature", 2, "--untrained-norm", "-o", out)
    assert result.exit_code == 0, result.output
    assert attention_attributes(out)[0]["scale"] == pytest.approx(8**-0.5 / 2)


@pytest.mark.parametrize(
    ("norm", "options", "message"),
    [
        ("fixed-temperature", (), "say which with --temperature"),
        ("fixed-temperature", ("--temperature", "0"), "temperature is 0.0, but must be above 0"),
        ("fixed-temperature", ("--temperature", "1e-300"), "temperature is 1e-300, but must be above 0, from 1e-06"),
        ("softmax", ("--temperature", "2"), "--temperature is for norm fixed-temperature"),
        ("softmax", ("--temperature-coefficients", "icml2025"), "for norm adaptive-temperature, not for softmax"),
        ("adaptive-temperature", ("--temperature-coefficients", "icml2026"), "the presets are: icml2025, arxiv2024"),
    ],
)
def test_options_that_cannot_work_are_refused(checkpoint, sharp_export, tmp_path, norm, options, message):
    result = sharp_export(checkpoint("softmax"), "--norm", norm, *options, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"temperature_coefficients": []}, "temperature_coefficients"),
        ({"temperature_coefficients": ["steep"]}, "temperature_coefficients.0"),
        ({"entropy_threshold": -1}, "entropy_threshold"),
        ({"version": 2}, "version"),
        ({"colour": "red"}, "colour"),
        ({"samples": 0}, "samples"),
    ],
)
def test_a_wrong_preset_is_one_sentence(checkpoint, sharp_export, tmp_path, changes, word):
    file = preset(tmp_path / "fit.json", **changes)
    options = ("--norm", "adaptive-temperature", "--temperature-coefficients", file)
    result = sharp_export(checkpoint("softmax"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    message = result.output.split("Error: ")[-1]
    assert message.count("\n") == 1
    assert f"is not a temperature preset: {word}: " in message


@pytest.mark.parametrize("content", [b"", b"not json", b"\xff\xfe", b"[]"])
def test_a_file_that_is_no_preset_at_all(checkpoint, sharp_export, tmp_path, content):
    (tmp_path / "fit.json").write_bytes(content)
    options = ("--norm", "adaptive-temperature", "--temperature-coefficients", tmp_path / "fit.json")
    result = sharp_export(checkpoint("softmax"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "is not a temperature preset" in result.output


def test_a_checkpoint_keeps_its_own_polynomial(sharp_export, tmp_path):
    model = tiny_model("adaptive-temperature")
    model.config = replace(model.config, temperature_coefficients=(1.5,), entropy_threshold=0.1)
    save_checkpoint(tmp_path / "own.pt", model)
    result = sharp_export(tmp_path / "own.pt", "--norm", "adaptive-temperature", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert attention_attributes(tmp_path / "out")[0]["temperature_coefficients"] == [1.5]
