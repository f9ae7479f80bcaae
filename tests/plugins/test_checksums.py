"""A model folder that was damaged on its way is found before it is served."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.plugins.checksums import damaged_files, update_sums, verify_files, write_manifest
from sharp.plugins.doctor.cli import doctor
from sharp.plugins.errors import InputError, NotFoundError
from sharp.plugins.manifest import FileSum, read_manifest
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
    """One bit, near the end."""
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
    """Unchecked, a model with a damaged weight generates another text than before, and no error."""
    LLM(folder, backend=BACKEND)
    flip(folder / name)
    with pytest.raises(InputError, match=rf"{name} is damaged: its SHA-256 is \w+, and the export wrote \w+; copy or"):
        verify_files(folder, read_manifest(folder))
    with pytest.raises(InputError, match=rf"{name} (is damaged|is not)"):
        LLM(folder, backend=BACKEND)
    result = CliRunner().invoke(serve, [str(folder), "--grpc-port", "0", "--http-port", "0", "--device", "cpu"])
    assert (result.exit_code, result.output.count("Error: ")) == (2, 1)
    if name == "more/data":  # nothing reads it
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
    """Its files are links into `blobs`, which were refused as outside the folder."""
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
