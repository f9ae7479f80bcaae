"""The blocks of docs/your-own-model.md, run in order as a reader would, at a smaller size and for seconds."""

import re
import subprocess
import sys
from pathlib import Path

from sharp.client import Client
from sharp.plugins.manifest import read_manifest
from sharp.serving import SamplingParams
from tests.full.end_to_end.commands import serve

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "your-own-model.md"
SMALLER = {
    "WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 128, 4, 4, 256, 257": (
        "WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 32, 4, 1, 64, 257"
    ),
    "time.time() - began > 120": "time.time() - began > 5",
}


def test_the_tutorial_ends_with_a_served_model(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for old, new in SMALLER.items():
        assert sum(old in block for block in blocks) == 1
        blocks = [block.replace(old, new) for block in blocks]
    (tmp_path / "text.txt").write_bytes((ROOT / "LICENSE").read_bytes())
    for name, block in zip(("gpt.py", "train.py", "export.py"), blocks, strict=False):
        (tmp_path / name).write_text(block, encoding="utf-8")
    assert (tmp_path / "gpt.py").read_text().count("normalized_attention(") == 1
    for name in ("train.py", "export.py"):
        done = subprocess.run(
            [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr
    manifest = read_manifest(tmp_path / "gpt-ssa")
    assert (manifest.verified, manifest.cache.form, manifest.norm.name, manifest.norm.trained) == (
        *(True, "paged", "ssa"),
        True,
    )
    with serve(tmp_path / "gpt-ssa") as server, Client(server.grpc) as client:
        assert client.generate("To be", SamplingParams(max_tokens=4)).token_ids
