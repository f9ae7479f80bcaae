"""The blocks of docs/your-own-model.md, run in order as by a reader, at a smaller size and for seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

from sharp.core.manifest import read_manifest
from tests.full.end_to_end.commands import serve

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
PAGE = ROOT / "docs" / "your-own-model.md"
SMALLER = {
    "WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 128, 4, 4, 256, 257": (
        "WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 32, 4, 1, 64, 257"
    ),
    "time.time() - began > 120": "time.time() - began > 5",
}


# A short form of the page's text above the block of a saved program.
BEFORE_SAVED = """import torch
from gpt import GPT

model, ids = GPT(), torch.zeros(2, 8, dtype=torch.int64)
model.load_state_dict(torch.load("gpt.pt", weights_only=True))
"""
# nanoGPT's own file, and a block that `tests/exporter/adapt/test_module.py` tests
NOT_RUN = ("GPTConfig", "adapt_module")


def test_the_tutorial_ends_with_a_served_model(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    blocks = [block for kind, block in fenced if kind == "python"]
    for old, new in SMALLER.items():
        assert sum(old in block for block in blocks) == 1
        blocks = [block.replace(old, new) for block in blocks]
    (tmp_path / "text.txt").write_bytes((ROOT / "LICENSE").read_bytes())
    files = [block for block in blocks if not any(name in block for name in NOT_RUN)]
    for name, block in zip(("gpt.py", "train.py", "export.py", "save.py"), files, strict=True):
        (tmp_path / name).write_text(BEFORE_SAVED * (name == "save.py") + block, encoding="utf-8")
    assert (tmp_path / "gpt.py").read_text().count("normalized_attention(") == 1

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    for name in ("train.py", "export.py", "save.py"):
        run(sys.executable, name)
    manifest = read_manifest(tmp_path / "gpt-ssa")
    assert (manifest.verified, manifest.cache.form, manifest.norm.name, manifest.norm.trained) == (
        *(True, "paged", "ssa"),
        True,
    )
    serving, asking, _of_a_trainer, saved = [block for kind, block in fenced if not kind][:4]
    assert serving == "sharp-serve gpt-ssa\n"
    with serve(tmp_path / "gpt-ssa") as server:
        here = asking.replace("localhost:50051", server.grpc).replace("localhost:8000", server.http)
        generate, metrics = here.splitlines()
        assert run("bash", "-c", generate.replace("64", "4")).strip()
        assert "sharp_attention_entropy_nats" in run("bash", "-c", metrics)
    export, inspect = saved.splitlines()
    run("bash", "-c", export)
    assert read_manifest(tmp_path / "gpt-saved").norm.name == "ssa"
    assert "layer" in run("bash", "-c", inspect)
