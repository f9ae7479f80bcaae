"""The commands of the README for one's own model, on a tiny one. Those of its first screen are in the tutorials."""

import os
import re
import sys
from pathlib import Path

from filelock import FileLock

from tests.full.docs.tutorial_commands import PORTS_LOCK, ROOT, run, servers, shortened, tiny_folder

SECTION = re.compile(r"^## Your own model\n(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENTERED = ". .venv/bin/activate"  # these tests run in it


def test_the_commands_run_as_they_stand(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for name in ("model.gguf", "path/to/hugging-face-folder"):
        tiny_folder(work / name)
    readme = (ROOT / "README.md").read_text()
    (work / "README.md").write_text(readme[:100])  # the tiny model's context is short
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    (section,) = SECTION.findall(shortened(readme))
    commands = [
        command for block in BLOCK.findall(section) for line in block.splitlines() for command in line.split(" && ")
    ]
    with FileLock(PORTS_LOCK), servers(work, variables) as start:
        for command in commands:
            if command.startswith("sharp-serve"):
                start("sharp serve", command)
            elif command != ENTERED:
                run(command, "", work, variables)
    assert sum(command.startswith("sharp-serve") for command in commands) == 2
