"""Bad input of `sharp-export` ends with one sentence, exit code 2, and no file half-written."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.reading import read_source
from sharp.models.byte_tokenizer import save_byte_tokenizer
from sharp.models.checkpoint import save_checkpoint
from sharp.models.hugging_face import to_hugging_face
from sharp.models.masked_lm import SharpForMaskedLM
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny


def assert_refused(result: Result, output: Path, *words: str) -> None:
    assert result.exit_code == 2, result.output
    message = result.output.split("Error: ")[-1]
    for word in words:
        assert word in message
    assert "Traceback" not in result.output
    assert not output.exists()
    assert not list(output.parent.glob(f".{output.name}.*"))


def test_missing_checkpoint(sharp_export, tmp_path):
    assert_refused(sharp_export(tmp_path / "no.pt", "--norm", "ssa", "-o", tmp_path / "out"), tmp_path / "out", "exist")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 10, 1000])
def test_truncated_checkpoint(checkpoint, sharp_export, tmp_path, suffix, keep):
    source = checkpoint("ssa", suffix=suffix)
    source.write_bytes(source.read_bytes()[:keep])
    assert_refused(sharp_export(source, "--norm", "ssa", "-o", tmp_path / "out"), tmp_path / "out", "tiny")


def test_pickle_is_not_run(sharp_export, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    torch.save({"format": "sharp", "state_dict": Evil()}, tmp_path / "evil.pt")
    assert_refused(sharp_export(tmp_path / "evil.pt", "--norm", "ssa", "-o", tmp_path / "out"), tmp_path / "out")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["notes.txt", "model.gguf", "model.safetensors", "model.pt"])
def test_wrong_format(sharp_export, tmp_path, name):
    (tmp_path / name).write_text("this is not a checkpoint")
    assert_refused(sharp_export(tmp_path / name, "--norm", "softmax", "-o", tmp_path / "out"), tmp_path / "out", name)


def test_unknown_norm_lists_the_known_ones(checkpoint, sharp_export, tmp_path):
    result = sharp_export(checkpoint("ssa"), "--norm", "sofmax", "-o", tmp_path / "out")
    assert_refused(result, tmp_path / "out", "'sofmax'", "softmax", "asentmax")


@pytest.mark.parametrize("norm", ["sentmax", "asentmax", "assmax"])
def test_norm_whose_parameters_the_checkpoint_lacks(checkpoint, sharp_export, tmp_path, norm):
    result = sharp_export(checkpoint("softmax"), "--norm", norm, "-o", tmp_path / "out")
    assert_refused(result, tmp_path / "out", norm, "parameters")


def test_output_folder_that_is_not_empty_is_left_alone(checkpoint, sharp_export, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("work")
    result = sharp_export(checkpoint("ssa"), "--norm", "ssa", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "not empty" in result.output
    assert (tmp_path / "out" / "precious").read_text() == "work"


def test_output_folder_that_cannot_be_made(checkpoint, sharp_export, tmp_path):
    (tmp_path / "file").write_text("")
    result = sharp_export(checkpoint("ssa"), "--norm", "ssa", "-o", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "cannot be made" in result.output


def test_output_folder_that_is_a_mount_point(checkpoint, sharp_export, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "out")
    result = sharp_export(checkpoint("ssa"), "--norm", "ssa", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "is a mount point" in result.output
    assert f"choose a folder in it: -o {tmp_path / 'out' / 'model'}" in result.output
    assert "Reading the checkpoint" not in result.output


def test_a_path_that_the_system_refuses(checkpoint, sharp_export, tmp_path):
    for arguments in (["x" * 300, "--norm", "ssa"], [checkpoint("ssa"), "--norm", "ssa", "-o", tmp_path / ("x" * 300)]):
        result = sharp_export(*arguments)
        assert result.exit_code == 2, result.output
        assert "File name too long" in result.output


def test_hugging_face_folder_of_another_architecture(sharp_export, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    result = sharp_export(tmp_path / "mine", "--norm", "softmax", "-o", tmp_path / "out")
    assert_refused(result, tmp_path / "out", "bloom", "sharp-export --list")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "48"}, ("hidden_size",)),
        ({"num_key_value_heads": 4}, ("incomplete", "its config.json describes")),
        ({"sliding_window": "x"}, ("transformers cannot run it",)),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("is quantized", "--quantize")),
    ],
)
def test_hugging_face_folder_with_another_configuration(sharp_export, tmp_path, change, words):
    config = save(tiny("llama"), tmp_path / "mine") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert_refused(
        sharp_export(tmp_path / "mine", "--norm", "softmax", "-o", tmp_path / "out"), tmp_path / "out", *words
    )


def test_hugging_face_folder_without_weights(sharp_export, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    result = sharp_export(tmp_path / "empty", "--norm", "softmax", "-o", tmp_path / "out")
    assert_refused(result, tmp_path / "out", "has no .safetensors files")


def test_the_weights_of_a_hugging_face_folder_alone(sharp_export, tmp_path):
    file = save(tiny("llama"), tmp_path / "mine") / "model.safetensors"
    result = sharp_export(file, "--norm", "softmax", "-o", tmp_path / "out")
    assert_refused(
        result, tmp_path / "out", "holds the weights of a Hugging Face model", f"give the whole folder, {file.parent}"
    )


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"lm_head.weight": "../secret.safetensors"}}, ("'../secret.safetensors'", "not in the folder")),
        ({"weight_map": {"lm_head.weight": "/secret.safetensors"}}, ("not in the folder",)),
        ({"weight_map": {"lm_head.weight": 7}}, ("not in the folder",)),
        ({"weight_map": []}, ("damaged",)),
        ([], ("damaged",)),
    ],
)
def test_an_index_that_names_weights_elsewhere(sharp_export, tmp_path, index, words):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "mine" / "model.safetensors.index.json").write_text(json.dumps(index))
    result = sharp_export(tmp_path / "mine", "--norm", "softmax", "-o", tmp_path / "out")
    assert_refused(result, tmp_path / "out", *words)


def test_an_encoder_is_refused(sharp_export, tmp_path):
    model = SharpForMaskedLM(replace(tiny_model("softmax").config, causal=False))
    save_checkpoint(tmp_path / "encoder.pt", model)
    to_hugging_face(model).save_pretrained(tmp_path / "folder")
    for name in ("encoder.pt", "folder"):
        result = sharp_export(tmp_path / name, "--norm", "softmax", "-o", tmp_path / "out")
        assert_refused(result, tmp_path / "out", name, "SharpForMaskedLM")


@pytest.mark.parametrize(("file", "word"), [("model.safetensors", "damaged"), ("tokenizer.json", "tokenizer")])
def test_damaged_hugging_face_folder_of_our_own(sharp_export, tmp_path, file, word):
    to_hugging_face(tiny_model("ssa")).save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / file).write_text("{}")
    result = sharp_export(tmp_path / "mine", "--norm", "ssa", "-o", tmp_path / "out")
    assert_refused(result, tmp_path / "out", file, word)


def test_a_tokenizer_that_knows_more_tokens_than_the_model(sharp_export, tmp_path):
    to_hugging_face(tiny_model("ssa", vocab_size=20, tokenizer="none")).save_pretrained(tmp_path / "mine")
    save_byte_tokenizer(tmp_path / "mine")
    result = sharp_export(tmp_path / "mine", "--norm", "ssa", "-o", tmp_path / "out")
    assert_refused(result, tmp_path / "out", "tokens, but the model has 20; give the tokenizer")


def test_a_disk_that_is_full(checkpoint, sharp_export, tmp_path, monkeypatch):
    def full(_folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # the tokenizers package raises no narrower exception

    monkeypatch.setattr("sharp.exporter.checkpoints.own_model.save_byte_tokenizer", full)
    result = sharp_export(checkpoint("ssa"), "--norm", "ssa", "-o", tmp_path / "out")
    words = ("cannot be written", "tokenizer.json: No space left on device", "; make room on that disk, or choose")
    assert_refused(result, tmp_path / "out", *words)


def test_a_disk_without_room_is_found_before_the_model_is_traced(checkpoint, sharp_export, tmp_path, monkeypatch):
    monkeypatch.setattr("sharp.core.output_file.shutil.disk_usage", lambda _path: SimpleNamespace(free=10_000))
    monkeypatch.setattr("sharp.exporter.export._export_into", None)
    result = sharp_export(checkpoint("ssa"), "--norm", "ssa", "-o", tmp_path / "out")
    words = ("out would take 0 MB, and its disk has 0 MB free; make room, or choose a folder on another disk",)
    assert_refused(result, tmp_path / "out", *words)


def test_a_header_of_tens_of_thousands_of_empty_tensors_is_refused_at_once(tmp_path):
    """Files with more tensors than the limit are refused by their header alone.

    400,000 empty tensors once took a minute and more than 1 GB, because each became an object.
    """
    count = 40_000
    tensors = {f"t{index}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for index in range(count)}
    header = json.dumps(tensors).encode()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for path in (tmp_path / "own.safetensors", folder / "model.safetensors"):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(InputError, match=r"has 40000 tensors; the limit is 20000"):
            read_source(path if path.parent == tmp_path else folder, "softmax")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, 1) + bytes(64))
    with pytest.raises(InputError, match="has 40000 tensors by its header; the limit is 20000, so it is damaged"):
        read_source(tmp_path / "model.gguf", "softmax")
