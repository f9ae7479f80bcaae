"""The native library is found or refused with a sentence, and runs with the requested settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sharp.core.errors import InputError, SharpError
from sharp.plugins import library_path
from tests.marks import full
from tests.serving.conftest import write_folder


def test_the_library_is_found() -> None:
    assert Path(library_path("onnxruntime")).name == "libsharp_ops.so"


def test_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(InputError, match=r"'tflite'.*onnxruntime"):
        library_path("tflite")


def test_a_library_that_is_not_built_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharp.plugins.LIBRARIES", {"onnxruntime": "libmissing.so"})
    with pytest.raises(SharpError, match=r"libmissing\.so is not built; install"):
        library_path("onnxruntime")


def test_a_library_for_gpus_says_how_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharp.plugins.LIBRARIES", {"tensorrt": "libmissing.so"})
    with pytest.raises(SharpError, match=r"libmissing\.so is not built; run `make kernels`"):
        library_path("tensorrt")


def test_only_the_entry_points_are_exported() -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library_path("onnxruntime")], capture_output=True, text=True, check=True
    ).stdout
    assert sorted(line.split()[-1] for line in symbols.splitlines()) == [
        "RegisterCustomOps",
        "sharp_logprobs",
        "sharp_plan",
        "sharp_sample",
    ]


def test_an_unknown_instruction_set_is_refused_when_the_library_is_registered() -> None:
    code = (
        "import onnxruntime, sharp.plugins\n"
        "options = onnxruntime.SessionOptions()\n"
        "options.register_custom_ops_library(sharp.plugins.library_path('onnxruntime'))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SHARP_ISA": "mmx"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "SHARP_ISA is 'mmx'; this processor can run:" in finished.stderr


@pytest.mark.parametrize(("given", "kept"), [({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")])
def test_onnx_runtime_reports_its_use_only_if_the_user_says_so(given: dict[str, str], kept: str) -> None:
    code = "import os, sharp.plugins.op.cache_tensors; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment | given, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == kept


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SHARP_LIBRARY_FOLDER", "{folder}", "libsharp_ops.so cannot be used as Sharp's kernel library: "),
        ("SHARP_LIBRARY_FOLDER", "{folder}/missing", "missing', which is no folder; correct or unset it"),
        ("SHARP_ISA", "quantum", "SHARP_ISA is 'quantum'; this processor can run: "),
    ],
)
@pytest.mark.parametrize("kernels", ["on", full("off")])
def test_a_wrong_library_or_instruction_set_ends_the_start_with_a_sentence(
    tmp_path: Path, variable: str, value: str, message: str, kernels: str
) -> None:
    """The server does not start with a wrong library or instruction set.

    Once ONNX Runtime ended in a traceback or, without kernels, every request failed.
    """
    (tmp_path / "libsharp_ops.so").write_text("not a library")
    folder = write_folder(tmp_path / "model", hashing=0)
    command = [
        sys.executable,
        "-c",
        "from sharp.core.cli import main; main()",
        "serve",
        str(folder),
        "--grpc-port",
        "0",
        "--http-port",
        "0",
    ]
    command = [*command, "--device", "cpu", *(["--no-kernels"] if kernels == "off" else [])]
    environment = {**os.environ, variable: value.format(folder=tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
