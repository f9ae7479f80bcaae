"""`make wheel`: the wheel, installed by pip in a new environment of every CPython here, works without the checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full.release.fresh_environment import ROOT, environment, run

SCRIPTS = Path(sys.executable).parent
GRPC = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status")
OLDEST = ("protobuf==6.33.0", *(f"{package}==1.80.0" for package in GRPC))
# tritonclient[grpc] pins protobuf to 6, which leaves these versions.
WITH_TRITON = ("protobuf>=6.33,<7", "grpcio>=1.81.1")


def pythons() -> list[str]:
    """Return the path of an interpreter of each CPython, on PATH or beside this one, where pyenv puts it."""
    found = {}
    for minor in range(11, 16):
        beside = sorted(Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python3"))
        for program in (shutil.which(f"python3.{minor}"), *beside):
            if program is not None and minor not in found:
                works = subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0
                found |= {minor: str(program)} if works else {}
    return list(found.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    run(SCRIPTS / "sharp", "export", "models/checkpoints/text-ssa.safetensors", "--norm", "ssa", "-o", folder)
    return folder


def test_the_wheel_is_for_every_python_and_for_old_systems(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    shown = " ".join(run(SCRIPTS / "auditwheel", "show", wheel, PATH=f"{SCRIPTS}:{os.environ['PATH']}").split())
    (minor,) = re.findall(r'consistent with the following platform tag: "manylinux_2_(\d+)_x86_64"', shown)
    assert int(minor) <= 28


@pytest.mark.parametrize("python", pythons())
def test_a_fresh_environment_serves(wheel: Path, model: Path, tmp_path: Path, python: str) -> None:
    bin_folder = environment(tmp_path / "venv", wheel, "serve", python=python)
    said = run(bin_folder / "sharp", "generate", model, "The package", "--max-tokens", 8, cwd=tmp_path)
    assert said.strip()
    assert run(bin_folder / "sharp", "docs", "how-to/gpu", cwd=tmp_path) == (ROOT / "docs/how-to/gpu.md").read_text()
    where = run(
        bin_folder / "python", "-c", "from sharp.plugins import library_path as p; print(p('onnxruntime'))", cwd="/"
    )
    assert where.startswith(str(tmp_path))


@pytest.mark.parametrize("packages", [OLDEST, WITH_TRITON], ids=["oldest", "protobuf 6"])
def test_generated_code_runs_with_every_protobuf_of_the_metadata(
    wheel: Path, model: Path, tmp_path: Path, packages: tuple[str, ...]
) -> None:
    bin_folder = environment(tmp_path / "venv", wheel, "serve", *packages)
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    asked = run(bin_folder / "python", script, bin_folder / "sharp-serve", model, cwd=tmp_path)
    assert asked.splitlines()[-1] == "6 5 True"  # 6 is protobuf's major version


ASK = """
import re, subprocess, sys
from google.protobuf import __version__
from sharp import Client, SamplingParams
import sharp.kserve.grpc_service_pb2_grpc

command = [*sys.argv[1:], "--grpc-port", "0", "--http-port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    ready = next(found for line in server.stdout if (found := re.search(r"ready grpc=(\\S+)", line)))
    with Client(ready[1]) as client:
        completion = client.generate("The package", SamplingParams(max_tokens=5, temperature=0))
    server.terminate()
    server.communicate()
print(__version__.split(".")[0], completion.usage.completion_tokens, bool(completion.text))
"""
