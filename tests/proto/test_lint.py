"""`buf lint` finds nothing in `sharp.v1`. The test is skipped where npm, which installs buf, is missing."""

import subprocess
from pathlib import Path

from tests.missing_tools import optional

ROOT = Path(__file__).parents[2]
BUF = "@bufbuild/buf@1.75.0"


@optional("npm")
def test_the_protocol_is_clean():
    folder = ROOT / "build" / "buf"
    program = folder / "node_modules" / ".bin" / "buf"
    if not program.exists():
        install = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--silent", "--prefix", folder]
        subprocess.run([*install, BUF], check=True, timeout=240)
    result = subprocess.run([program, "lint"], cwd=ROOT / "proto", capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
