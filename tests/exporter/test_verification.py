"""What verification lets through."""

import numpy as np
import pytest

from sharp.exporter.own_model import OwnDecoder
from sharp.exporter.paged_session import PagedSession
from sharp.exporter.paged_verification import verify_paged
from tests.exporter.conftest import tiny_model


@pytest.mark.parametrize("spoil", ["logits", "stats"])
def test_a_nan_in_the_last_sequence_fails(checkpoint, sharp_export, tmp_path, monkeypatch, spoil):
    sharp_export(checkpoint("ssa"), "--norm", "ssa", "-o", tmp_path / "out")
    step = PagedSession.step

    def spoiled(session, tokens):
        logits, stats = step(session, tokens)
        (logits if spoil == "logits" else stats)[-1][...] = np.nan
        return logits, stats

    monkeypatch.setattr(PagedSession, "step", spoiled)
    assert not any(
        comparison.passed
        for comparison in verify_paged(OwnDecoder(tiny_model("ssa")), tmp_path / "out", "onnxruntime", int)
    )
