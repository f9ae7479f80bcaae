"""Models of the papers' authors' own code: small ones in `authors/`, with what those computed (`authors/write.py`)."""

import json
from pathlib import Path

import numpy as np
import pytest

from sharp.exporter.checkpoints.authors_models import norm_of_configuration
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import read_manifest
from tests.marks import full

AUTHORS = Path(__file__).parent / "authors"


def source_of(name: str) -> Path:
    return AUTHORS / name / "ckpt.pt" if name == "ssa-gpt2" else AUTHORS / name


@pytest.mark.parametrize(
    ("name", "norm", "positions"),
    [
        full("asentmax-nape", "asentmax", "nape"),
        full("sentmax-nape", "sentmax", "nape"),
        full("ssmax-rope", "ssmax", "rope"),
        ("ssa-gpt2", "ssa", "learned"),
        full("sparse-modernbert", "entmax", "rope"),
    ],
)
def test_the_export_computes_what_the_authors_class_does(sharp_export, tmp_path, name, norm, positions):
    result = sharp_export(source_of(name), "--cache", "none", "-o", tmp_path / "out")  # no --norm
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.norm.name, manifest.norm.trained, manifest.positions) == (norm, True, positions)
    expected = json.loads((AUTHORS / name / "expected.json").read_text())
    ids = np.array(expected["input_ids"])
    inputs = [ids, np.ones_like(ids)] if manifest.kind == "encoder" else [ids]
    logits = UncachedSession(tmp_path / "out", kernels=True).run(inputs)
    target = np.array(expected["logits"])
    assert np.abs(logits - target).max() <= 1e-4 * max(1.0, np.abs(target).max())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_scale_delta": 0.5}, "has attn_scale_delta 0.5, but Sharp has 1 only"),
        ({"attn_type": "topk"}, "has attn_type 'topk', but Sharp has 'regular' only"),
        ({"attn_scale_type": "nakanishi"}, "attn_scale_type 'nakanishi' with entmax_alpha 1.5, which no norm here is"),
    ],
)
def test_what_no_norm_here_is_is_refused(change, message):
    content = json.loads((AUTHORS / "asentmax-nape" / "config.json").read_text())
    with pytest.raises(InputError) as refused:
        norm_of_configuration({**content, **change}, "config.json")
    assert message in str(refused.value)
