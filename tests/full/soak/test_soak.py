"""A run of `make soak` that takes twelve seconds instead of an hour."""

from pathlib import Path

import pytest

from tests.full.soak import soak as module
from tests.full.soak.attacks import ATTACKS
from tests.full.soak.soak import ROUGH, soak


@pytest.mark.parametrize("kind", ATTACKS)
def test_an_attack_is_held_off(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTACKS", {kind: ATTACKS[kind]})
    report = soak(tmp_path, 3, 0.5, hostile=True)
    assert report.wrong == []
    assert report.requests[kind]
    assert report.requests["gRPC"] or report.requests["HTTP"]


def test_mixed_load_loses_no_token_and_leaves_nothing_open(tmp_path: Path) -> None:
    report = soak(tmp_path, 12, 0.5)
    assert report.wrong == []
    assert report.faults
    assert report.requests["gRPC"] and report.requests["HTTP"] and report.requests["HTTP, guided"]
    first, last = report.samples[len(report.samples) // 2], report.samples[-1]
    assert last.series == first.series
    assert last.descriptors <= first.descriptors + 16 * ROUGH  # descriptors of connections come and go
