"""`sharp fit-length-scale` reads windows of a text, and an export takes the fitted exponents."""

import json

import pytest
from click.testing import CliRunner
from transformers import PreTrainedTokenizerFast

from sharp.core.manifest import read_manifest
from sharp.exporter.temperature.length_scale import fit_length_scale
from sharp.models.byte_tokenizer import byte_tokenizer
from tests.exporter.tiny_hugging_face import save, tiny
from tests.full.fuzz.readers import write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save(tiny("llama", vocab_size=257), tmp_path_factory.mktemp("llama") / "model")
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(folder)
    return folder


def run(*arguments: object):
    return CliRunner().invoke(fit_length_scale, [str(argument) for argument in arguments])


def test_from_a_folder_to_an_export(folder, tmp_path, sharp_export):
    text = tmp_path / "text.txt"
    text.write_text("some words and others, " * 40)
    fitted = tmp_path / "scale.json"
    options = ("--onset", 16, "--length", 48, "--samples", 2, "--threads", 1, "--text", text, "-o", fitted)
    result = run(folder, *options)
    assert result.exit_code == 0, result.output
    assert "cross entropy of other windows beyond 16 tokens" in result.output
    content = json.loads(fitted.read_text())
    assert (content["norm"], content["length_onset"]) == ("log-power", 16)
    exported = sharp_export(folder, "--trained-norm", fitted, "-o", tmp_path / "out")
    assert exported.exit_code == 0, exported.output
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.norm.name, manifest.norm.normalizer, manifest.norm.trained) == ("log-power", "softmax", True)

    content["parameters"]["gamma"] = content["parameters"]["gamma"][:1]
    fitted.write_text(json.dumps(content))
    refused = sharp_export(folder, "--trained-norm", fitted, "-o", tmp_path / "other")
    assert refused.exit_code == 2
    assert "gamma has 1 lists" in " ".join(refused.output.split())


def test_from_a_gguf_file_to_an_export(tmp_path, sharp_export):
    write_gguf(tmp_path)
    fitted, gguf = tmp_path / "scale.json", tmp_path / "tiny.gguf"
    result = run(gguf, "--onset", 8, "--length", 16, "--samples", 1, "--threads", 1, "-o", fitted)
    assert result.exit_code == 0, result.output
    exported = sharp_export(gguf, "--trained-norm", fitted, "-o", tmp_path / "out")
    assert exported.exit_code == 0, exported.output
    assert read_manifest(tmp_path / "out").norm.name == "log-power"

    fitted.write_text(json.dumps({"norm": "ssa", "parameters": {"b": "blk.{layer}.b", "n": 1.5}}))
    refused = sharp_export(gguf, "--trained-norm", fitted, "-o", tmp_path / "other")
    assert refused.exit_code == 2
    assert "the trained norm names the weights 'blk.0.b', which" in " ".join(refused.output.split())


def test_llama4_is_exported_by_its_formula(folder, tmp_path, sharp_export):
    options = ("--norm", "llama4", "--untrained-norm", "--length-onset", "8")
    exported = sharp_export(folder, *options, "-o", tmp_path / "out")
    assert exported.exit_code == 0, exported.output
    parameters = {parameter.name: parameter for parameter in read_manifest(tmp_path / "out").norm.parameters}
    assert (parameters["length_onset"].value, parameters["length_onset"].origin) == (8, "option")
    assert "log_length_offset" not in parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--onset", "64", "--length", "64"), "--length is 64, but must be above --onset (64)"),
        (("--length", "100000"), "and the context of"),
    ],
)
def test_what_cannot_be_fitted_is_one_sentence(folder, options, message):
    result = run(folder, *options)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_other_norms_have_no_onset(folder, tmp_path, sharp_export):
    refused = sharp_export(folder, "--norm", "ssmax", "--length-onset", "8", "-o", tmp_path / "out")
    assert refused.exit_code == 2 and "--length-onset is for the norms log-power, llama4" in refused.output
