"""A large model's weights leave memory while ONNX Runtime runs, and return with the same bits."""

import pytest
import torch

from sharp.exporter.export import ExportSettings, export
from sharp.exporter.forms.paged.cases import PagedVerifier
from sharp.exporter.verification import parked_weights as parking
from sharp.exporter.verification.parked_weights import parked
from sharp.exporter.verification.verifier import verify as verify_unparked
from sharp.models.checkpoint import save_checkpoint
from tests.exporter.conftest import tiny_model


def test_weights_come_back_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr(parking, "LEAST_BYTES", 1)
    model = tiny_model("ssa")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with parked(model, tmp_path):
        assert all(parameter.numel() == 0 for parameter in model.parameters())
        assert [file.name for file in tmp_path.iterdir()] == [parking.FILE]
    assert list(tmp_path.iterdir()) == []
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), tiny_model("ssa")(tokens))


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(parking, "LEAST_BYTES", 1)
    model = tiny_model("ssa")
    with pytest.raises(OSError, match="No such file"), parked(model, tmp_path / "gone"):
        pass
    assert all(parameter.numel() for parameter in model.parameters())


def test_small_models_stay(tmp_path):
    model = tiny_model("ssa")
    with parked(model, tmp_path):
        assert list(tmp_path.iterdir()) == []
        assert all(parameter.numel() for parameter in model.parameters())


def test_an_export_verifies_with_parked_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(parking, "LEAST_BYTES", 1)
    seen = []

    def verify(verifier, *arguments, **options):
        found = verify_unparked(verifier, *arguments, **options)
        seen.append(sum(parameter.numel() for parameter in verifier.model.parameters()))
        return found

    monkeypatch.setattr("sharp.exporter.export.verify", verify)
    save_checkpoint(tmp_path / "tiny.safetensors", tiny_model("ssa"), torch.float32)
    result = export(
        tmp_path / "tiny.safetensors",
        ExportSettings(norm="ssa"),
        tmp_path / "out",
        lambda _name, _steps: lambda: None,
        lambda _source: None,
    )
    assert result.verification.passed
    assert seen[0] > 0
    assert not (tmp_path / "out" / parking.FILE).exists()


def test_nothing_else_holds_the_weights_that_are_parked(checkpoint, sharp_export, tmp_path, monkeypatch):
    monkeypatch.setattr(parking, "LEAST_BYTES", 0)
    expected, opened = PagedVerifier.expected, PagedVerifier.open
    weights: list[int] = []
    freed: list[bool] = []

    def remember(self, case):
        if not weights:
            weights.extend(parameter.untyped_storage()._weak_ref() for parameter in self.model.parameters())
        return expected(self, case)

    def look(self, folder, *, kernels):
        freed.extend(torch.UntypedStorage._expired(weight) for weight in weights)
        return opened(self, folder, kernels=kernels)

    monkeypatch.setattr(PagedVerifier, "expected", remember)
    monkeypatch.setattr(PagedVerifier, "open", look)
    result = sharp_export(checkpoint("softmax"), "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert freed
    assert all(freed)
