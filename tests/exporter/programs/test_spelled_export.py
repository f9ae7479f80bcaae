"""A model folder computes what its module computes, however the module spells its norm."""

from pathlib import Path
from typing import Any

import pytest
import torch

import sharp
from sharp.core.manifest import read_manifest
from sharp.exporter.forms.paged.session import PagedSession
from tests.exporter.programs import gpt
from tests.exporter.programs.spellings import Spelling
from tests.marks import full

WRITTEN = {"scale": "divided", "product": "matmul", "mixing": "matmul", "source": "tril", "cast": False}
AFTERWARDS = {
    "form": "divided afterwards",
    "transform": "sign in the exponent",
    "place": "powers",
    "hide": "times mask",
}
OF_LEVELS = {"form": "softmax", "transform": "where", "place": "levels", "hide": "finfo.min"}
TURNED = {"scale": "query", "product": "turned", "mixing": "turned", "source": "window"}
OF_ROWS = {"form": "rows", "place": "logits", "hide": "where"}


@pytest.mark.parametrize(
    ("norm", "parts"),
    [
        ("ssa", WRITTEN | AFTERWARDS),  # two heads have an n of at most 1
        full("ssa", WRITTEN | OF_LEVELS | TURNED),
        full("softmax", WRITTEN | AFTERWARDS | {"transform": "exp2"}),
        full(
            "sigmoid", WRITTEN | TURNED | OF_ROWS | {"transform": "tanh", "place": "powers", "hide": "tril of weights"}
        ),
        full("entmax 1.5", WRITTEN | OF_ROWS | {"transform": "package"}),
        full("adaptive", WRITTEN | OF_ROWS | TURNED | {"transform": "log_softmax"}),
    ],
)
def test_the_folder_has_the_logits_of_the_module(norm: str, parts: dict[str, Any], tmp_path: Path) -> None:
    module = gpt.GPT(Spelling(norm, parts), kv_heads=gpt.HEADS).eval()
    with torch.no_grad():
        for name in ("query", "key"):
            getattr(module.attention[0], name).weight.mul_(4)  # large weights make attention differ by token
    sharp.export(module, (torch.zeros(1, 9, dtype=torch.int64),), output=tmp_path / "model")
    tokens = torch.randint(gpt.VOCABULARY, (1, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module(tokens)[0]
    manifest: Any = read_manifest(tmp_path / "model")
    session = PagedSession(tmp_path / "model", manifest, manifest.cache, kernels=True)
    session.reset(1, 33)
    parts_of = [session.step([part.numpy()])[0][0] for part in tokens[0].split([20, 1, 1, 11])]
    found = torch.cat([torch.from_numpy(part) for part in parts_of])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
