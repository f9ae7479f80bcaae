"""`make arm-wheel` on an emulated 64-bit Arm: kernels agree with the reference, and tokens with this machine's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full.release.fresh_environment import ROOT, run
from tests.missing_tools import optional

pytestmark = optional("aarch64-linux-gnu-g++", "qemu-aarch64")
# The versions of glibc that Debian 12 can run.
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)] + ["manylinux2014_aarch64"]
ABIS = ("cp311", "abi3", "none")
GENERATE = """
import platform, sys
from sharp import LLM, SamplingParams

prompts = [list(b"The package is installed by"), list(range(97, 123)) * 9]
completions = LLM(sys.argv[1]).generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
print(platform.machine(), [list(completion.token_ids) for completion in completions])
"""


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `python` for Arm, and with the wheel and its dependencies in `site`."""
    folder = tmp_path_factory.mktemp("arm")
    run("bash", ROOT / "tests/full/release/arm_root.sh", folder)
    run("make", "arm-wheel")
    (wheel,) = (ROOT / "dist").glob("*_aarch64.whl")
    options = [f"--{name}={value}" for name, values in (("platform", PLATFORMS), ("abi", ABIS)) for value in values]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    chosen = ["--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp", *options]
    run(*pip, *chosen, "--target", folder / "site", "--constraint", ROOT / "constraints.txt", f"{wheel}[serve]", "onnx")
    return folder


def emulated(arm: Path, *command: object) -> str:
    return run(arm / "python", *command, cwd=arm, PYTHONPATH=str(arm / "site"))


def test_it_runs_on_old_systems(arm: Path) -> None:
    (wheel,) = (ROOT / "dist").glob("*_aarch64.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_27_aarch64.whl")


def test_its_kernels_agree_with_the_reference(arm: Path) -> None:
    script = ROOT / "tests" / "plugins" / "conformance" / "run_data.py"
    library = arm / "site" / "sharp" / "plugins" / "lib" / "libsharp_ops.so"
    assert "AArch64" in subprocess.run(["readelf", "-h", library], capture_output=True, text=True, check=True).stdout
    said = emulated(arm, script, "--library", library)
    assert said.splitlines()[-1].endswith(", 0 failed")


def test_it_generates_the_same_tokens(arm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    scripts = Path(sys.executable).parent
    run(scripts / "sharp", "export", "models/checkpoints/text-ssa.safetensors", "--norm", "ssa", "-o", folder)
    (tmp_path / "generate.py").write_text(GENERATE)
    ours = run(sys.executable, tmp_path / "generate.py", folder, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    theirs = emulated(arm, tmp_path / "generate.py", folder)
    assert ours.split(maxsplit=1)[0] == "x86_64" and theirs.split(maxsplit=1)[0] == "aarch64"
    assert ours.split(maxsplit=1)[1] == theirs.split(maxsplit=1)[1]
