"""`installed` makes the content of an image by the steps of the Dockerfile, without Docker."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from tests.full.deploy.dockerfile import Stage, lineage

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(sys.executable).parent


@contextmanager
def installed(stages: list[Stage], target: str) -> Iterator[Path]:
    """Yield a folder with `sharp`, the image's /opt/sharp after the stage `target`, and `wheels`.

    The folder is not in /tmp, because /tmp is new in a container, and the checkout may lie there.
    """
    folder = Path(tempfile.mkdtemp(prefix="sharp-image-", dir="/var/tmp"))
    folder.chmod(0o755)
    (ROOT / "build").mkdir(exist_ok=True)
    # The packages of `make setup` are the build's tools, and the checkout's build folder saves compiling again.
    places = {"/opt/tools/bin": SCRIPTS, "/opt/sharp": folder / "sharp", "/wheels": folder / "wheels"}
    commands = [command for stage in lineage(stages, target) for command in stage.values("RUN")][2:]
    assert [command.split()[-1] for command in commands[:2]] == [".", "/opt/sharp"]
    try:
        with FileLock(ROOT / "build" / "image.lock"):  # the wheels of all images are built in the same folder
            for command in commands:
                for path, here in places.items():
                    command = command.replace(path, str(here))
                result = subprocess.run(
                    ["bash", "-ec", command], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
                )
                assert result.returncode == 0, result.stderr
        yield folder
    finally:
        subprocess.run(["rm", "-rf", folder], check=True, timeout=120)
