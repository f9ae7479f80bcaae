"""`sharp-export --dry-run` says what would be written, and writes nothing."""

import pytest

from sharp.exporter.plan import BYTES


@pytest.mark.parametrize("cache", ["paged", "contiguous", "none"])
def test_it_says_what_would_be_written_and_writes_nothing(checkpoint, sharp_export, tmp_path, cache):
    source = checkpoint("ssa", layers=2)
    before = sorted(tmp_path.iterdir())
    result = sharp_export(source, "--norm", "ssa", "--cache", cache, "--dry-run", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert sorted(tmp_path.iterdir()) == before
    text = " ".join(result.output.split())
    for word in ("2 layers, 6 query / 2 KV heads of 8", "norm ssa", f"cache {cache}", "input_ids", "about 0."):
        assert word in text
    keys_and_values, layers, kv_heads, head_dim = 2, 2, 2, 8
    kilobytes = keys_and_values * layers * kv_heads * head_dim * BYTES["float32"] / 1e3
    assert ("cache none" if cache == "none" else f"cache {kilobytes:,.1f} kB a token, float32") in text


def test_it_refuses_what_the_export_refuses(checkpoint, sharp_export, tmp_path):
    result = sharp_export(checkpoint("softmax"), "--norm", "ssa", "--dry-run", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "--untrained-norm" in result.output
