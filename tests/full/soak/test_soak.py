"""Twelve seconds of what `make soak` does for an hour."""

from pathlib import Path

from tests.full.soak.soak import ROUGH, soak


def test_mixed_load_loses_no_token_and_leaves_nothing_open(tmp_path: Path) -> None:
    report = soak(tmp_path, 12, 0.5)
    assert report.wrong == []
    assert report.faults
    assert report.requests["gRPC"] and report.requests["HTTP"] and report.requests["HTTP, guided"]
    first, last = report.samples[len(report.samples) // 2], report.samples[-1]
    assert last.series == first.series
    assert last.descriptors <= first.descriptors + 16 * ROUGH  # connections come and go
