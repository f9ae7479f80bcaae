"""A `.pt2` that is damaged or hostile does nothing but fail with a sentence."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sharp.exporter.programs.archive import load_program
from sharp.exporter.programs.module import evaluated, trace
from sharp.plugins.errors import InputError
from tests.exporter.programs import gpt


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    module = gpt.GPT()
    with evaluated(module):
        torch.export.save(trace(module, (torch.zeros(2, 9, dtype=torch.int64),)), path)
    return path


def rewrite(program: Path, folder: Path, part: str, change: Callable[[bytes], bytes]) -> Path:
    """A copy with the part whose name ends so changed."""
    path = folder / "changed.pt2"
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        assert any(name.endswith(part) for name in old.namelist())
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith(part) else content)
    return path


def replaced(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode())

    return change


def test_an_honest_one_is_loaded(program: Path) -> None:
    assert load_program(program).graph_signature.user_inputs == ("ids",)


@pytest.mark.parametrize(
    ("part", "old", "new", "reason"),
    [
        ("model.json", "torch.ops.aten.layer_norm.default", "torch.os.system", "calls 'torch.os.system'"),
        ("model.json", "torch.ops.aten.layer_norm.default", "torch.ops.aten.from_file.default", "calls"),
        ("model.json", "torch.ops.aten.layer_norm.default", "torch.ops.load_library", "calls"),
        ("model.json", "positive=True", "positive=exit()", "no expression"),
        ("model.json", "Symbol('s", "Symbol('os.s", "no expression"),
        ("model.json", "builtins.tuple", "collections.defaultdict", "of type collections.defaultdict"),
        ("weights_config.json", '"use_pickle": false', '"use_pickle": true', "is pickled"),
    ],
)
def test_what_torch_would_execute_is_refused(
    program: Path, tmp_path: Path, part: str, old: str, new: str, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        load_program(rewrite(program, tmp_path, part, replaced(old, new)))


def test_example_inputs_are_never_unpickled(program: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    buffer = io.BytesIO()
    torch.save(Evil(str(made)), buffer)
    for content in (buffer.getvalue(), pickle.dumps(Evil(str(made)))):
        with pytest.raises(InputError):
            load_program(rewrite(program, tmp_path, "sample_inputs/model.pt", lambda _old, new=content: new))
    assert not made.exists()


def test_a_constant_that_is_an_object_is_never_unpickled(program: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    config = {
        "config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False, "tensor_meta": None}}
    }
    path = rewrite(program, tmp_path, "constants_config.json", lambda _: json.dumps(config).encode())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/data/constants/opaque_obj_0", pickle.dumps(Evil(str(made))))
    with pytest.raises(InputError, match="an object and no tensor"):
        load_program(path)
    assert not made.exists()


@pytest.mark.parametrize("cut", [0, 10, 5000, -30])
def test_a_damaged_one_is_refused(program: Path, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.pt2"
    path.write_bytes(program.read_bytes()[:cut])
    with pytest.raises(InputError, match="damaged"):
        load_program(path)
