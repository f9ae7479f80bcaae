"""Corrections of head outputs: what is folded into the weights computes the same, and a model that cannot is seen."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from sharp.exporter.adapt.calibration import RECALLED_TOKENS, calibrate, start_from, with_recalls
from sharp.exporter.adapt.mixing import OutputSums, fold_mixings, takes_mixings
from sharp.exporter.adapt.student import Student, finish, make_student
from sharp.exporter.sources.norm_options import NO_OPTIONS
from sharp.models.adapted_model import attention_norms
from sharp.models.byte_tokenizer import byte_tokenizer
from tests.exporter.tiny_hugging_face import tiny

IDS = torch.arange(3, 83)


def student_of(kind: str, folder: Path, norm: str = "entmax") -> Student:
    tiny(kind, vocab_size=300).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(folder)
    return make_student(folder, norm, NO_OPTIONS, 4, None, 24, 0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "phi"])
def test_matrices_become_part_of_the_output_projections(kind: str, tmp_path: Path) -> None:
    student = student_of(kind, tmp_path / kind)
    modules = student.described.attention_modules
    assert takes_mixings(student.model, modules)
    generator = torch.Generator().manual_seed(1)
    for norm in attention_norms(student.model):
        heads = norm.described.q_heads
        dim = student.decoder.config.head_dim
        norm.mixing = torch.randn(heads, dim, dim, generator=generator)
    with torch.no_grad():
        mixed = student.model(IDS[None]).logits
        assert fold_mixings(student.model, modules)
        assert all(norm.mixing is None for norm in attention_norms(student.model))
        torch.testing.assert_close(student.model(IDS[None]).logits, mixed, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "afmoe", "diffllama", "granite", "gpt_bigcode", "opt", "cohere2"])
def test_a_trial_of_matrices_changes_nothing(kind: str, tmp_path: Path) -> None:
    student = student_of(kind, tmp_path / kind)
    before = {name: tensor.clone() for name, tensor in student.model.state_dict().items()}
    assert takes_mixings(student.model, student.described.attention_modules) == (kind not in ("afmoe", "diffllama"))
    assert all(norm.mixing is None and norm.observer is None for norm in attention_norms(student.model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.model.state_dict().items())


def test_a_model_whose_outputs_are_gated_gets_no_matrices(tmp_path: Path) -> None:
    student = student_of("qwen3_next", tmp_path / "gated")
    assert not takes_mixings(student.model, student.described.attention_modules)
    found = calibrate(student, IDS, 0.3, lambda: None)
    assert found.mixings == () and not found.record()["corrected"]


def test_a_finished_student_computes_what_it_did_with_its_matrices(tmp_path: Path) -> None:
    student = student_of("llama", tmp_path / "llama")
    student = start_from(student, calibrate(student, IDS, 9.0, lambda: None))
    assert any(norm.mixing is not None for norm in attention_norms(student.model))
    teacher = load_file(tmp_path / "llama" / "model.safetensors")
    with torch.no_grad():
        before = student.model(IDS[None]).logits
        finish(student)
        torch.testing.assert_close(student.model(IDS[None]).logits, before, atol=1e-4, rtol=1e-4)
    projections = [name for name in teacher if "o_proj" in name]
    assert any(not torch.equal(student.model.state_dict()[name], teacher[name]) for name in projections)


def test_the_errors_of_sums_are_those_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(3, 50, 5, generator=generator) for _ in range(2))
    sums = OutputSums.empty(3, 5)
    sums.add(x[:, :20], y[:, :20])
    sums.add(x[:, 20:], y[:, 20:])
    mixing = torch.randn(3, 5, 5, generator=generator, dtype=torch.float64)
    expected = (x.double() @ mixing - y).norm(dim=(1, 2)) / y.double().norm(dim=(1, 2))
    torch.testing.assert_close(sums.errors(mixing), expected)


def test_recalls_repeat_spans_of_the_first_half() -> None:
    sequence = torch.arange(1000, 1400)
    found = with_recalls(sequence, torch.Generator().manual_seed(3))
    assert torch.equal(found[:200], sequence[:200])
    assert set(found[200:].tolist()) <= set(range(1000, 1200))
    breaks = [200, *(index for index in range(201, 400) if found[index] != found[index - 1] + 1), 400]
    spans = [end - begin for begin, end in pairwise(breaks)]
    assert all(RECALLED_TOKENS[0] <= span for span in spans[:-1]) and len(spans) > 3
    for length in (0, 1, 2, 5):
        assert len(with_recalls(sequence[:length], torch.Generator().manual_seed(3))) == length
