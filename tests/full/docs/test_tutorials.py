"""Tutorials by copy and paste: their files are written, their commands run, what they print is compared."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)  # and what it prints; nothing is not compared
FILES = {"own-normalizer": {"python": "softmax1.py", "toml": "pyproject.toml"}}
CHECKPOINTS = {"own-normalizer": {"model.safetensors": ROOT / "models" / "checkpoints" / "text-ssa.safetensors"}}


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


@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda page: page.stem)
def test_it_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    variables = environment(tmp_path / "venv")
    work = tmp_path / "work"
    work.mkdir()
    for name, source in CHECKPOINTS.get(page.stem, {}).items():
        (work / name).symlink_to(source)
    ran = 0
    for kind, content in BLOCK.findall(page.read_text()):
        if kind in FILES.get(page.stem, {}):
            (work / FILES[page.stem][kind]).write_text(content)
        for command, shown in COMMAND.findall(content) if kind == "console" else ():
            done = subprocess.run(
                command, shell=True, cwd=work, env=variables, capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            if shown:
                assert done.stdout == shown, command
            ran += 1
    assert ran
