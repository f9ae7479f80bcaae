"""Files of other programs are refused with a sentence that names the program, by commands and readers of weights."""

import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sharp.exporter.programs.foreign_files import owner_of
from tests.exporter.tiny_hugging_face import save, tiny


def torchscript(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


def whole_module(path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(2, 2)), path)


def objects(path: Path) -> None:
    torch.save({"net.weight": torch.ones(1), "options": Namespace(width=2)}, path)


def aotinductor(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/aotinductor/model/c.so", b"\x7fELF")


def program(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), path)


def keras(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", b"")


def hdf5(path: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))


def old_torch(path: Path) -> None:
    torch.save({"a.weight": torch.ones(1)}, path, _use_new_zipfile_serialization=False)


def numpy_archive(path: Path) -> None:
    np.savez(path, a=np.ones(2))


def other(path: Path) -> None:
    path.write_bytes(b"anything")


KINDS = [
    ("model.pt", torchscript, "is TorchScript", "sharp export FILE.py:CLASS --weights WEIGHTS.pt"),
    ("model.pt2", torchscript, "is TorchScript", "torch.jit.load('model.pt2').state_dict()"),
    ("model.pth", whole_module, "is a whole pickled module (torch.nn.modules.container.Sequential)", "state_dict()"),
    ("model.pt", whole_module, "is a whole pickled module", "sharp export FILE.py:CLASS"),
    ("pytorch_model.bin", objects, "holds objects beside its weights (argparse.Namespace)", "does not unpickle"),
    ("model.pt2", aotinductor, "is a package of AOTInductor", "torch.export.save"),
    ("model.pt", program, "is a program of torch.export.save", ".pt2: rename it"),
    ("model.keras", keras, "is a Keras model", "convert it"),
    ("model.weights.h5", hdf5, "is an HDF5 file, as Keras writes them", "convert it"),
    ("model.pt", old_torch, "is of a torch before 1.6", "save it again"),
    ("model.npz", numpy_archive, "is an archive of NumPy", "convert it"),
    ("model.onnx", other, "is an ONNX model", "convert it"),
    ("model.ckpt.index", other, "is a checkpoint of TensorFlow", "convert it"),
    ("flax_model.msgpack", other, "is a checkpoint of Flax", "convert it"),
]


@pytest.mark.parametrize(("name", "write", "what", "remedy"), KINDS)
def test_a_file_of_another_program_is_told_whose_it_is(
    tmp_path: Path, sharp_export, name: str, write, what: str, remedy: str
) -> None:
    write(tmp_path / name)
    result = sharp_export(tmp_path / name, "--norm", "softmax", "-o", tmp_path / "out")
    sentence = " ".join(result.stderr.split())
    assert result.exit_code == 2, result.output
    assert f"{tmp_path / name} {what}" in sentence
    assert remedy in sentence
    assert not (tmp_path / "out").exists()


def test_a_folder_of_tensorflow_is_told_whose_it_is(tmp_path: Path, sharp_export) -> None:
    (tmp_path / "saved_model.pb").touch()
    result = sharp_export(tmp_path, "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "is a model of TensorFlow" in result.stderr


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_weights_of_hugging_face_without_their_configuration(tmp_path: Path, sharp_export, architecture: str) -> None:
    file = save(tiny(architecture), tmp_path / "mine") / "model.safetensors"
    file = file.rename(tmp_path / "model.safetensors")
    result = sharp_export(file, "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "weights of a Hugging Face model without its config.json" in " ".join(result.stderr.split())


def test_plain_weights_and_programs_are_nobody_elses(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(1), "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "a.pt")
    torch.save({"state_dict": nn.Linear(2, 2).state_dict(), "optimizer": {"lr": 0.1}}, tmp_path / "b.pt")
    torch.save({"p": nn.Parameter(torch.ones(1)), "q": torch.ones(2)[:1].to_sparse()}, tmp_path / "c.pt")
    program(tmp_path / "d.pt2")
    assert [owner_of(path) for path in sorted(tmp_path.iterdir())] == [None] * 4
