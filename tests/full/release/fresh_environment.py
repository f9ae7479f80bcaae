"""A fresh virtual environment with the wheel, as its users install it."""

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
    """Make a virtual environment with the wheel and packages, without compiling, and return its folder of scripts.

    Without `pip` the environment lacks pip, and this process's pip installs into it.
    """
    run(python, "-m", "venv", *(() if pip else ("--without-pip",)), folder)
    # Python compiles modules when a test imports them, which is a tenth of all modules.
    options = ("--quiet", "--no-compile", "--only-binary", ":all:")
    program = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python")
    install = (*program, "install", *options)
    chosen = {re.split("[=<>]", package)[0] for package in packages}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.split("==")[0] not in chosen]
    if chosen:  # the other packages of the same family follow the chosen version
        kept = [line for line in kept if not line.startswith(("grpcio", "googleapis"))]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(kept))
    run(*install, "--constraint", constraints, f"{wheel}[{extras}]", *packages)
    return folder / "bin"
