"""Tutorials and how-tos by copy and paste: their files are written, their commands run, what they print is compared.

The first one is run from the wheel, as a newcomer would: `tests/full/release/test_first_tutorial.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full.docs.tutorial_commands import PAGES, run_tutorial
from tests.prometheus import program

FIRST = "chat-and-heads"
NOT_RUN = ("gpu", "tensorrt", "upgrade")  # they need a GPU, or two releases


def environment(folder: Path) -> dict[str, str]:
    """A fresh environment that sees the packages of this one, so that what a tutorial installs stays in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    for name in ("sharp", "pip"):
        module, function = ("sharp.plugins.cli", "main") if name == "sharp" else ("pip._internal.cli.main", "main")
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
