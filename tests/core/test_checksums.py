"""A damaged model folder is found by its checksums before it is served."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.core.checksums import damaged_files, update_sums, verify_files, write_manifest
from sharp.core.errors import InputError, NotFoundError
from sharp.core.manifest import FileSum, read_manifest
from sharp.plugins.doctor.cli import doctor
from sharp.serving.cli import serve
from sharp.serving.config import BackendConfig
from sharp.serving.llm import LLM
from tests.serving.conftest import write_folder

BACKEND = BackendConfig(threads=1, kernels=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_folder(tmp_path / "model", hashing=0)
    (made / "more").mkdir()
    (made / "more" / "data").write_bytes(b"0" * 3_000_000)
    write_manifest(made, read_manifest(made))
    return made


def flip(path: Path) -> None:
    """Flip one bit near the end of a file."""
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def test_every_file_has_its_size_and_sum(folder: Path):
    files = read_manifest(folder).files
    assert sorted(files) == ["model.onnx", "more/data", "tokenizer.json"]
    content = (folder / "model.onnx").read_bytes()
    assert files["model.onnx"] == FileSum(size=len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("name", ["model.onnx", "more/data", "tokenizer.json"])
def test_a_folder_with_one_wrong_bit_is_not_served(folder: Path, name: str):
    """Without checksums, a model with a damaged weight would generate another text and no error."""
    LLM(folder, backend=BACKEND)
    flip(folder / name)
    with pytest.raises(InputError, match=rf"{name} is damaged: its SHA-256 is \w+, and the export wrote \w+; copy or"):
        verify_files(folder, read_manifest(folder))
    with pytest.raises(InputError, match=rf"{name} (is damaged|is not)"):
        LLM(folder, backend=BACKEND)
    result = CliRunner().invoke(serve, [str(folder), "--grpc-port", "0", "--http-port", "0", "--device", "cpu"])
    assert (result.exit_code, result.output.count("Error: ")) == (2, 1)
    if name == "more/data":  # no part of Sharp reads this file
        LLM(folder, backend=BackendConfig(threads=1, kernels=False, verify_files=False))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, r"is incomplete: 'more/data' is missing"),
    "cut short": (
        lambda path: path.write_bytes(b"0" * 99),
        "is damaged: it has 99 bytes, and the export wrote 3",
    ),
    "a link": (
        lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
        r"names 'more/data', which is outside the model folder",
    ),
}


@pytest.mark.parametrize("name", ["x" * 5000, "two\nlines"])
def test_a_name_that_no_file_has_is_refused_in_one_sentence(folder: Path, name: str):
    manifest = read_manifest(folder)
    files = {**manifest.files, name: next(iter(manifest.files.values()))}
    with pytest.raises(InputError, match=r"is incomplete: '(xxx|two.nlines)") as refused:
        verify_files(folder, manifest.model_copy(update={"files": files}))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_what_is_wrong_is_said(folder: Path, change: Callable[[Path], object], message: str):
    change(folder / "more" / "data")
    with pytest.raises(InputError, match=message):
        verify_files(folder, read_manifest(folder))
    assert len(damaged_files(folder)) == 1


def test_the_doctor_names_every_damaged_file(folder: Path, tmp_path: Path):
    result = CliRunner().invoke(doctor, [str(folder)])
    assert (result.exit_code, result.output) == (0, f"{folder}: all files are as they were exported\n")
    flip(folder / "tokenizer.json")
    flip(folder / "model.onnx")
    result = CliRunner().invoke(doctor, [str(folder)])
    assert (result.exit_code, result.output.count("is damaged"), result.output.count("\n")) == (1, 2, 1)
    with pytest.raises(NotFoundError, match="is not a model folder"):
        damaged_files(tmp_path)


def test_a_folder_of_before_the_sums_is_served_with_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    LLM(write_folder(tmp_path / "old", hashing=0), backend=BACKEND)
    assert caplog.text.count("its files cannot be verified, as it was exported without checksums") == 1
    with pytest.raises(InputError, match="was exported without checksums; export the model again"):
        damaged_files(tmp_path / "old")


def test_an_engine_that_is_built_later_belongs_to_the_folder(folder: Path, tmp_path: Path):
    engine, elsewhere = folder / "model.engine", tmp_path / "other.engine"
    for path in (engine, elsewhere):
        path.write_bytes(b"engine")
    update_sums(folder, [engine, elsewhere, folder / "model.timing-cache"])
    assert read_manifest(folder).files["model.engine"].size == 6
    engine.write_bytes(b"Engine")
    with pytest.raises(InputError, match=r"model\.engine is damaged"):
        verify_files(folder, read_manifest(folder))


def test_a_folder_of_hugging_faces_cache_is_served(folder: Path, tmp_path: Path):
    """Files of a snapshot are links into `blobs`. They were once refused as outside the folder."""
    snapshot, blobs = tmp_path / "snapshots" / "0123abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (path for path in folder.iterdir() if path.is_file()):
        file.rename(blobs / file.name[::-1])
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name[::-1]}")
    (snapshot / "more").mkdir()
    (folder / "more" / "data").rename(blobs / "data")
    (snapshot / "more" / "data").symlink_to("../../../blobs/data")
    LLM(snapshot, backend=BACKEND)
    (tmp_path / "secret").write_text("secret")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../secret")
    with pytest.raises(InputError, match="which is outside the model folder"):
        LLM(snapshot, backend=BACKEND)


def test_a_manifest_that_names_a_file_from_elsewhere_is_no_good_folder(folder: Path):
    """No checksum covers `sharp.json` itself: `sharp doctor` once passed a folder whose model was /etc/passwd."""
    manifest = read_manifest(folder)
    manifest.model_copy(update={"model_file": "/etc/passwd"}).write(folder)
    assert damaged_files(folder) == [
        f"{folder / 'sharp.json'} names '/etc/passwd', which is not among the files that the export wrote"
    ]
    result = CliRunner().invoke(doctor, [str(folder)])
    assert result.exit_code == 1
    assert "/etc/passwd" in result.output


@pytest.mark.parametrize("kind", ["large", "endless", "fifo"])
def test_a_manifest_that_cannot_be_read_to_its_end_is_refused(folder: Path, kind: str):
    path = folder / "sharp.json"
    path.unlink()
    if kind == "large":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    with pytest.raises((InputError, NotFoundError), match=r"the limit|is not a model folder"):
        read_manifest(folder)
