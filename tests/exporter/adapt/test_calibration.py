"""Calibration: factors of heads agree with the entmax package, chosen heads keep softmax, and the export has both."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from entmax import entmax15
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import sharp.models.hugging_face  # noqa: F401 - teaches transformers the model type
from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.adapt.adapt import adapt
from sharp.exporter.adapt.calibration import (
    CHECKED,
    FACTORS,
    FIRST_MIXED_QUERY,
    LARGER,
    MIXED_QUERIES,
    _above,
    calibrate,
    query_positions,
    start_from,
)
from sharp.exporter.adapt.cli import adapt as command
from sharp.exporter.adapt.mixing import RIDGE
from sharp.exporter.adapt.settings import AdaptSettings
from sharp.exporter.adapt.student import make_student
from sharp.exporter.adapt.text import read_text
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.sources.norm_options import NO_OPTIONS
from sharp.models.adapted_model import AdaptedNorm, attention_norms
from sharp.models.byte_tokenizer import byte_tokenizer
from tests.exporter.tiny_hugging_face import tiny

TEXT = "".join(f"{number} green bottles hang on the wall, number {number * 7}.\n\n" for number in range(1500))


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    model = tiny("llama", vocab_size=300)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter *= 12  # large weights make heads differ from each other and from uniform attention
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "bottles.txt"
    path.write_text(TEXT)
    return path


def test_the_factor_of_a_head_is_the_one_of_least_error_by_the_entmax_package(teacher: Path) -> None:
    ids = torch.arange(3, 103)
    found = calibrate(make_student(teacher, "entmax", NO_OPTIONS, 4, None, 24, 0), ids, 0.3, lambda: None)
    model = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager").eval()
    seen: list[tuple[torch.Tensor, ...]] = []

    def attention(module, query, key, value, _mask, scaling, **_named):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = (query @ key.mT * scaling).masked_fill(~torch.ones(query.shape[2], key.shape[2]).tril().bool(), -1e9)
        seen.append((logits[0], value[0]))
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("test_calibration", attention)
    model.set_attn_implementation("test_calibration")
    with torch.no_grad():
        model(ids[None])
    positions = query_positions(len(ids))
    mixed = query_positions(len(ids), MIXED_QUERIES, FIRST_MIXED_QUERY)
    checks = torch.arange(len(mixed)) % CHECKED == 0
    for layer, (logits, value) in enumerate(seen):
        expected = logits.softmax(-1) @ value
        outputs = torch.stack([entmax15(c * logits, -1) @ value for c in FACTORS])
        best = (outputs - expected)[:, :, positions].square().sum((2, 3)).argmin(0)
        for head, choice in enumerate(found.choices[layer]):
            tried = FACTORS[best[head] : best[head] + 1 + LARGER]
            assert choice.factor in tried
            errors = []
            for factor in tried:
                x = outputs[FACTORS.index(factor), head, mixed].double().numpy()
                y = expected[head, mixed].double().numpy()
                fitted = x[~checks]
                weight = RIDGE * np.square(fitted).sum() / fitted.shape[1]
                # Ridge regression as least squares: the rows of weight^0.5 say that the matrix should be 1.
                one = weight**0.5 * np.eye(x.shape[1])
                matrix = np.linalg.lstsq(np.concatenate([fitted, one]), np.concatenate([y[~checks], one]))[0]
                wrong = np.linalg.norm(x[checks] @ matrix - y[checks])
                errors.append((wrong / np.linalg.norm(y[checks]), factor, matrix))
            least, factor, matrix = min(errors, key=lambda each: each[0])
            assert found.errors[layer][head] == pytest.approx(least, rel=1e-2, abs=1e-4)
            assert choice.factor == factor
            np.testing.assert_allclose(found.mixings[layer][head].numpy(), matrix, atol=2e-3)
    assert len({choice.factor for choices in found.choices for choice in choices}) > 1


def test_heads_of_a_kv_head_are_kept_together() -> None:
    assert _above([0.1, 0.2, 0.5, 0.5], 2, 0.3) == (2, 3)
    assert _above([0.1, 0.5, 0.1, 0.1], 2, 0.3) == (0, 1)  # the root mean square of 0.1 and 0.5 is 0.36
    assert _above([math.nan, 0.1], 2, 0.3) == (0, 1)
    assert _above([0.1, 0.2], 1, 0.0) == (0, 1)


def test_positions_are_spread_over_all_lengths() -> None:
    positions = query_positions(8192)
    assert positions[0] == 63 and positions[-1] == 8191
    assert sum(positions < 1024) > len(positions) / 2
    assert query_positions(57)[[0, -1]].tolist() == [13, 56] and len(query_positions(57)) > 20
    assert query_positions(1).tolist() == [0]


def test_heads_that_keep_softmax_do_what_they_did(teacher: Path) -> None:
    ids = torch.arange(3, 60)[None]
    original = AutoModelForCausalLM.from_pretrained(teacher).eval()
    student = make_student(teacher, "entmax", NO_OPTIONS, 4, None, 24, 0)
    kept = start_from(student, calibrate(student, ids[0], 0.0, lambda: None))
    assert kept.described.softmax_heads[0] == tuple(range(student.decoder.config.q_heads))
    with torch.no_grad():
        torch.testing.assert_close(kept.model(ids).logits, original(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_calibrated_model_is_exported_with_its_softmax_heads(
    teacher: Path, text: Path, tmp_path: Path, sharp_export
) -> None:
    student = make_student(teacher, "entmax", NO_OPTIONS, 4, None, 24, 0)
    train = read_text([text], student.opened.tokenizer, 300, 24, "").train
    errors = calibrate(student, train, 0.3, lambda: None).errors
    # Three query heads share a KV head, and are judged together by their root mean square.
    groups = [math.sqrt(sum(e**2 for e in layer[i : i + 3]) / 3) for layer in errors for i in range(0, len(layer), 3)]
    between = sum(sorted(groups)[1:3]) / 2  # some groups keep softmax, others do not
    folder = tmp_path / "calibrated"
    arguments = ["--norm", "entmax", "--calibrate-only", "--max-error", f"{between:.6f}", "--text", text, "-o", folder]
    result = CliRunner().invoke(command, [str(argument) for argument in (teacher, *arguments, "--length", 24)])
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    assert 0 < report["calibration"]["kept_share"] < 1 and report["recipe"]["steps"] == 0
    assert "heads that keep softmax" in (folder / "report.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    source = read_source(folder, None)
    ids = torch.arange(3, 40)[None]
    own = source.model.own_logits(ids)
    torch.testing.assert_close(model(ids).logits, own)
    assert not torch.allclose(own, AutoModelForCausalLM.from_pretrained(teacher).eval()(ids).logits, atol=1e-3)

    exported = sharp_export(folder, "-o", tmp_path / "exported")
    assert exported.exit_code == 0, exported.output
    manifest = read_manifest(tmp_path / "exported")
    assert manifest.norm.name == "entmax" and manifest.verified
    kept = report["calibration"]["softmax_heads"]
    assert {(norm.layer, norm.heads) for norm in manifest.norm.heads} == {
        (i, tuple(h)) for i, h in enumerate(kept) if h
    }
    assert {norm.name for norm in manifest.norm.heads} == {"softmax"}


def test_training_starts_from_a_calibration(teacher: Path, text: Path, tmp_path: Path) -> None:
    chosen = AdaptSettings(
        "ssa", text=(text,), held_out=text, length=24, tokens=48, rank=4, dtype="float32", calibrate="first"
    )
    report = adapt(teacher, chosen, tmp_path / "student")
    assert report is not None and not report["recipe"]["path"]
    assert report["calibration"]["choices"][0][0]["ssa"] is not None
    norms = attention_norms(AutoModelForCausalLM.from_pretrained(tmp_path / "student"))
    assert all(norm.head_parameters is not None for norm in norms)


@pytest.mark.parametrize(("norm", "calibrated"), [("entmax", True), ("asentmax", True), ("ssa", False)])
def test_entmax_and_its_family_are_calibrated_by_default(
    norm: str, calibrated: bool, teacher: Path, text: Path, tmp_path: Path
) -> None:
    chosen = AdaptSettings(norm, text=(text,), held_out=text, length=24, tokens=48, rank=4, dtype="float32")
    report = adapt(teacher, chosen, tmp_path / "student")
    assert report is not None
    assert (report["calibration"] is not None) == calibrated == (not report["recipe"]["path"])
    if calibrated:
        assert report["calibration"]["corrected"] and report["calibration"]["max_error"] == 0.2


def test_what_cannot_be_calibrated_is_refused(teacher: Path, text: Path, tmp_path: Path) -> None:
    arguments = [
        str(argument) for argument in (teacher, "--text", text, "-o", tmp_path / "student", "--calibrate-only")
    ]
    result = CliRunner().invoke(command, [*arguments, "--norm", "softmax"])
    assert result.exit_code == 2 and "has nothing to calibrate" in " ".join(result.output.split())
    result = CliRunner().invoke(command, [*arguments, "--norm", "entmax", "--max-error", "nan"])
    assert result.exit_code == 2 and "--max-error is nan" in " ".join(result.output.split())
    modules = ("a", "b")
    with pytest.raises(InputError, match="softmax_heads has 1 layers, but must have 2"):
        AdaptedNorm("entmax", modules, 4, 8, 16, softmax_heads=((0,),))
    with pytest.raises(InputError, match="names head 4, but heads are from 0 to 3"):
        AdaptedNorm("entmax", modules, 4, 8, 16, softmax_heads=((0,), (4,)))
