"""Tutorials and how-tos by copy and paste: files are written, commands run, and their output is compared.

`tests/full/release/test_first_tutorial.py` runs the first tutorial from the wheel, as a newcomer would.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full.docs.tutorial_commands import PAGES, run_tutorial
from tests.prometheus import program

pytestmark = pytest.mark.timeout(1800)  # pages use the same ports, so they wait for each other

FIRST = "chat-and-heads"
NOT_RUN = ("gpu", "tensorrt", "upgrade", "from-vllm")  # need a GPU, two releases, or vLLM


def environment(folder: Path) -> dict[str, str]:
    """Make an environment that sees the packages of this one, but keeps what a tutorial installs to itself."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    for name in ("sharp", "pip"):
        module, function = ("sharp.core.cli", "main") if name == "sharp" else ("pip._internal.cli.main", "main")
        script = folder / "bin" / name
        script.write_text(
            f"#!{folder}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "120"}


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {FIRST, *NOT_RUN}))
def test_it_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    variables = environment(tmp_path / "venv")
    if name == "dispersed-heads":
        variables["PATH"] += f":{Path(program('prometheus')).parent}"
    run_tutorial(name, tmp_path / "work", variables)
