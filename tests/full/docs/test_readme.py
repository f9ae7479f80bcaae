"""The README's commands for a user's own model run on a tiny model.

The tutorials test the commands of its first screen.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.full.docs.tutorial_commands import PORTS_LOCK, ROOT, run, servers, shortened, tiny_folder

SECTION = re.compile(r"^## Your own model\n(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENTERED = ". .venv/bin/activate"  # the tests already run in this environment


@pytest.mark.timeout(1800)  # the test waits for the tutorials, whose ports it uses
def test_the_commands_run_as_they_stand(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for name in ("model.gguf", "path/to/model.gguf", "path/to/hugging-face-folder"):
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
