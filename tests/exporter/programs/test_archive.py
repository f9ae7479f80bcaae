"""A `.pt2` file that is damaged or hostile is refused with one sentence and has no other effect."""

import io
import json
import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.module import evaluated, trace
from sharp.exporter.programs.archive import load_program
from sharp.exporter.programs.memory_limit import MASKS, memory_of_program
from sharp.exporter.programs.reading import read_program
from tests.exporter.programs import gpt


class Evil:
    """An object whose unpickling creates a file."""

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
    """Copy the program with one part changed, the part whose name ends with `part`; return the new path."""
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
        ("model.json", "torch.ops.aten.layer_norm.default", "torch.ops.aten.save.default", "does not have"),
        ("model.json", "torch.ops.aten.layer_norm.default", "torch.ops.aten.no_such.default", "does not have"),
        ("model.json", "positive=True", "positive=exit()", "no expression"),
        ("model.json", "Symbol('s", "Symbol('os.s", "no expression"),
        ("model.json", "builtins.tuple", "collections.defaultdict", "of type collections.defaultdict"),
        ("weights_config.json", '"use_pickle": false', '"use_pickle": true', "is pickled"),
        ("weights_config.json", '"as_int": 257', '"as_int": 257000000000', "numbers more than its data"),
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


def test_a_weight_with_another_byte_is_told(program: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(program) as archive:
        weights = [
            entry for entry in archive.infolist() if "/weights/" in entry.filename and entry.filename[-1].isdigit()
        ]
        largest = max(weights, key=lambda one: one.file_size)
        weight = archive.read(largest)
    content = program.read_bytes()
    place = content.index(weight) + len(weight) // 2
    path = tmp_path / "changed.pt2"
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(InputError, match=rf"its part {largest.filename} is damaged; copy or save it again"):
        load_program(path)


def test_the_pickles_of_torch_2_7_are_never_read(program: Path, tmp_path: Path) -> None:
    """Pickles of torch 2.7's format are never read, though torch reads them if a program of today has an error."""
    made = tmp_path / "made"
    path = rewrite(program, tmp_path, "archive_version", lambda _: b"1000")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("version", "8.20")
        for name in ("exported_program.json", "state_dict.pt", "constants.pt", "example_inputs.pt"):
            archive.writestr(f"serialized_{name}", pickle.dumps(Evil(str(made))))
    with pytest.raises(InputError):
        load_program(path)
    assert not made.exists()


def test_an_archive_of_which_two_readers_see_two_is_refused(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "prefixed.pt2"
    path.write_bytes(b"#!/bin/sh\n" + program.read_bytes())
    assert zipfile.ZipFile(path).namelist()
    with pytest.raises(InputError, match="damaged"):
        load_program(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 10**6, "damaged"),
        (b"null", "damaged"),
        (b"", "is empty"),
        (b"[" + b"[]," * 5_000_000 + b"[]]", "too large"),
    ],
    ids=["deep", "nothing", "empty", "long"],
)
def test_json_that_takes_time_or_memory_is_refused(program: Path, tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_program(rewrite(program, tmp_path, "models/model.json", lambda _: content))


def test_a_compressed_part_is_refused(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt2"
    path.write_bytes(program.read_bytes())
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("program/data/weights/weight_99", bytes(2**26))
    with pytest.raises(InputError, match="compressed"):
        load_program(path)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, sharp_export) -> None:
    pipe = tmp_path / "pipe.pt2"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(InputError, match=r"is (no regular file|a folder), but must be a program"):
            load_program(path)
    refused = sharp_export(pipe, "--norm", "softmax", "-o", tmp_path / "out")
    assert refused.exit_code == 2
    assert "is no regular file and no folder" in refused.output


class Doubled(nn.Module):
    """A module whose file has some kilobytes and whose program makes 2^39 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt.GPT()

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.ones(2**39)
        return self.model(ids) + x[0]


def test_a_program_that_takes_all_memory_is_stopped_and_its_line_named(tmp_path: Path) -> None:
    path = tmp_path / "large.pt2"
    module = Doubled()
    with evaluated(module):
        torch.export.save(trace(module, (torch.zeros(2, 9, dtype=torch.int64),)), path)
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(InputError, match=r"line \d+: x = torch.ones\(2\*\*39\): it takes more memory"):
        read_program(path, "softmax")
    assert resource.getrlimit(resource.RLIMIT_DATA) == limit


def test_inside_no_more_memory_than_that_is_given() -> None:
    with memory_of_program(0), pytest.raises(RuntimeError, match="allocate memory"):
        torch.empty(MASKS + 2**30, dtype=torch.uint8)
    torch.empty(MASKS + 2**30, dtype=torch.uint8)  # the memory is never written, so the system does not allocate it


def test_weights_that_a_program_does_not_read_are_named(tmp_path: Path) -> None:
    module = gpt.GPT()
    module.register_parameter("temperature", nn.Parameter(torch.ones(1)))
    path = tmp_path / "model.pt2"
    with evaluated(module):
        torch.export.save(trace(module, (torch.zeros(2, 9, dtype=torch.int64),)), path)
    (unused,) = read_program(path, None).unused
    assert unused.unknown == ("temperature",)
