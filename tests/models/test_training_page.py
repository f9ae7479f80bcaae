"""The training loop of docs/training.md runs as printed, and writes a checkpoint."""

import re
from pathlib import Path

from sharp.models.checkpoint import load_checkpoint

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def test_the_training_loop_writes_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = (
        code for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "save_checkpoint" in code
    )
    exec(example, {})
    model = load_checkpoint(tmp_path / "mine.safetensors")
    assert f"--norm {model.config.norm}" in example
