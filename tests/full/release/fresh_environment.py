"""A fresh environment that the wheel is installed into, as its users do."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(*command: object, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(
    folder: Path, wheel: Path, extras: str, *packages: str, python: str = sys.executable, pip: bool = False
) -> Path:
    """The folder of scripts of a fresh environment, with a `pip` or without; nothing in it was compiled here."""
    run(python, "-m", "venv", *(() if pip else ("--without-pip",)), folder)
    # Python compiles what a test imports, a tenth of what there is.
    options = ("--quiet", "--no-compile", "--only-binary", ":all:")
    program = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python")
    install = (*program, "install", *options)
    chosen = {re.split("[=<>]", package)[0] for package in packages}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.split("==")[0] not in chosen]
    if chosen:  # the others of the family follow
        kept = [line for line in kept if not line.startswith(("grpcio", "googleapis"))]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(kept))
    run(*install, "--constraint", constraints, f"{wheel}[{extras}]", *packages)
    return folder / "bin"
