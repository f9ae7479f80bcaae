"""`--alpha`, `--ssa-b`, `--ssa-n`, `--log-length-offset`, and norms that a checkpoint was not trained with."""

import json

import onnx
import pytest
from onnx import numpy_helper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.programs.reading import ProgramOptions
from sharp.models.byte_tokenizer import byte_tokenizer
from sharp.models.checkpoint import save_checkpoint
from sharp.models.hugging_face import to_hugging_face
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny


def parameters(folder):
    return {parameter.name: (parameter.value, parameter.origin) for parameter in read_manifest(folder).norm.parameters}


def attributes(folder):
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.domain == "ai.sharp")
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def head_params(folder):
    model = onnx.load(folder / "model.onnx")
    names = {node.input[9] for node in model.graph.node if node.domain == "ai.sharp"}
    return [numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name in names]


def test_an_untrained_norm_is_refused_without_the_flag(checkpoint, sharp_export, tmp_path):
    result = sharp_export(checkpoint("softmax"), "--norm", "ssa", "-o", tmp_path / "out")
    assert result.exit_code == 2
    message = " ".join(result.output.split("Error: ")[-1].split())
    assert "was trained with --norm softmax, not with ssa" in message
    assert "pass --untrained-norm" in message
    assert not (tmp_path / "out").exists()


def test_with_the_flag_it_says_what_the_norm_costs(checkpoint, sharp_export, tmp_path):
    result = sharp_export(checkpoint("softmax"), "--norm", "ssa", "--untrained-norm", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "UNTRAINED NORM" in result.output
    manifest = read_manifest(tmp_path / "out")
    assert not manifest.norm.trained
    measured = manifest.verification["perplexity"]
    assert (measured["text"], measured["tokens"]) == ("LICENSE", 1024)
    assert (measured["trained_norm"], measured["norm"]) == ("softmax", "ssa")
    assert measured["before"] != measured["after"] > 1
    assert f"{measured['before']:.1f} with softmax (trained), {measured['after']:.1f} with ssa" in result.output
    assert parameters(tmp_path / "out") == {"b": (1.0, "default"), "n": (1.5, "default")}


def test_a_text_of_the_users(checkpoint, sharp_export, tmp_path):
    (tmp_path / "text").write_text("to be or not to be", encoding="utf-8")
    options = ("--norm", "softmax", "--text", tmp_path / "text")
    result = sharp_export(checkpoint("softmax"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Perplexity of text, 18 tokens" in result.output


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), (b"\xff\xfe", "is not UTF-8"), (b"a", "less than two tokens")]
)
def test_a_text_that_cannot_be_read(checkpoint, sharp_export, tmp_path, content, message):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    options = ("--norm", "softmax", "--text", tmp_path / "text")
    result = sharp_export(checkpoint("softmax"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_text_is_read_whatever_the_tokenizer_was_set_to(sharp_export, tmp_path):
    to_hugging_face(tiny_model("softmax")).save_pretrained(tmp_path / "mine")
    tokenizer = Tokenizer.from_file(str(tmp_path / "mine" / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "mine" / "tokenizer.json"))
    (tmp_path / "text").write_text("to be or not to be", encoding="utf-8")
    options = ("--norm", "softmax", "--text", tmp_path / "text")
    result = sharp_export(tmp_path / "mine", *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Perplexity of text, 18 tokens" in result.output


def test_a_text_with_a_token_that_only_the_tokenizer_knows(sharp_export, tmp_path):
    # as in Gemma 3's 1B, the tokenizer gets one token more than the model
    folder = save(tiny("llama", vocab_size=257), tmp_path / "mine")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<image>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    (tmp_path / "text").write_text("a<image>b", encoding="utf-8")
    options = ("--norm", "ssa", "--untrained-norm")
    result = sharp_export(folder, *options, "--text", tmp_path / "text", "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "text has token id 257, which the tokenizer knows and the model, of 257 tokens," in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_alpha_of_the_checkpoint_wins_unless_another_is_given(sharp_export, tmp_path):
    save_checkpoint(tmp_path / "tiny.safetensors", tiny_model("entmax", alpha=1.25))
    for options, alpha, origin in (((), 1.25, "checkpoint"), (("--alpha", "1.75"), 1.75, "option")):
        out = tmp_path / origin
        result = sharp_export(tmp_path / "tiny.safetensors", "--norm", "entmax", *options, "-o", out)
        assert result.exit_code == 0, result.output
        assert attributes(out)["alpha"] == alpha
        assert parameters(out) == {"alpha": (alpha, origin)}
    assert "entmax: alpha 1.75 (from the command line)" in result.output


def test_ssa_parameters_of_the_checkpoint_win_unless_others_are_given(checkpoint, sharp_export, tmp_path):
    source = checkpoint("ssa", layers=2)
    result = sharp_export(source, "--norm", "ssa", "--ssa-n", "1", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert parameters(tmp_path / "out") == {"b": (None, "checkpoint"), "n": (1.0, "option")}
    assert "ssa: b learned in every head (from the checkpoint)" in result.output
    stored = head_params(tmp_path / "out")
    assert len(stored) == 2
    for layer in stored:
        assert len(set(layer[:, 0])) == len(layer)  # b is learned, so it differs between heads
        assert layer[:, 1] == pytest.approx(1.0)


def test_the_offset_of_the_length_scale(checkpoint, sharp_export, tmp_path):
    options = ("--norm", "ssmax", "--log-length-offset", "1")
    result = sharp_export(checkpoint("ssmax"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output  # the export is verified against PyTorch
    norm = json.loads((tmp_path / "out" / "sharp.json").read_text())["norm"]
    assert norm["log_length_offset"] == 1
    assert parameters(tmp_path / "out")["log_length_offset"] == (1, "option")


@pytest.mark.parametrize(
    ("norm", "options", "message"),
    [
        ("softmax", ("--alpha", "1.5"), "--alpha is for the norms entmax, sentmax, asentmax, not for softmax"),
        ("sparsemax", ("--alpha", "1.5"), "not for sparsemax"),
        ("entmax", ("--alpha", "1"), "--alpha is 1, but must be above 1"),
        ("entmax", ("--alpha", "1.00000000001"), "but must be above 1 and finite in float32"),
        ("entmax", ("--alpha", "64.1"), "but must be above 1 and at most 64"),
        ("entmax", ("--alpha", "0"), "--alpha is 0, but must be above 1"),
        ("entmax", ("--alpha", "inf"), "--alpha is inf, but must be above 1 and at most 64"),
        ("entmax", ("--ssa-b", "1"), "--ssa-b is for norm ssa, not for entmax"),
        ("ssa", ("--ssa-b", "0"), "--ssa-b is 0, but must be above 0"),
        ("ssa", ("--ssa-n", "0"), "--ssa-n is 0, but must be above 0"),
        ("ssa", ("--ssa-n", "nan"), "--ssa-n is nan, but must be above 0"),
        ("ssa", ("--log-length-offset", "2"), "--log-length-offset is for the norms ssmax"),
        ("ssmax", ("--log-length-offset", "0"), "--log-length-offset is 0, but must be from 1"),
        ("sentmax", ("--log-length-offset", "1"), "--log-length-offset is 1, but must be from 2"),
    ],
)
def test_options_that_cannot_work_are_refused(checkpoint, sharp_export, tmp_path, norm, options, message):
    result = sharp_export(checkpoint(norm), "--norm", norm, *options, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (ProgramOptions(tokenizer="bytes"), r"^--tokenizer is for models that have none, and .* has its own"),
        (ProgramOptions(norm_parameters={"b": 1.0}), r"^--norm-parameter is for programs of torch\.export"),
    ],
    ids=["tokenizer", "norm_parameters"],
)
def test_what_a_checkpoint_has_itself_is_not_given_beside_it(checkpoint, program, message):
    source = checkpoint("ssa")
    read_source(source, "ssa")
    with pytest.raises(InputError, match=message):
        read_source(source, "ssa", program=program)


@pytest.mark.parametrize("norm", ["ssa", "asentmax"])
def test_a_checkpoint_of_sharps_own_says_its_norm(checkpoint, sharp_export, norm):
    planned = sharp_export(checkpoint(norm), "--dry-run", "--json")
    assert planned.exit_code == 0, planned.output
    plan = json.loads(planned.stdout)
    assert (plan["norm"], plan["trained"]) == (norm, True)


def test_an_option_that_is_not_for_the_norm_that_a_checkpoint_says_is_refused(checkpoint, sharp_export):
    refused = sharp_export(checkpoint("ssa"), "--alpha", "1.5", "--dry-run")
    assert refused.exit_code == 2
    assert "--alpha is for the norms entmax, sentmax, asentmax, not for ssa" in " ".join(refused.output.split())
