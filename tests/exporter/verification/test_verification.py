"""Verification accepts small differences only, and marks a folder that fails it."""

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from sharp.core.errors import InputError
from sharp.core.manifest import Cache, read_manifest
from sharp.exporter.checkpoints.hooked_model import HookedDecoder
from sharp.exporter.checkpoints.own_model import OwnDecoder
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.forms.contiguous import cases as contiguous_verification
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.exporter.forms.paged.cases import PagedVerifier
from sharp.exporter.forms.paged.session import PagedSession
from sharp.exporter.graph.graph_options import GraphOptions
from sharp.exporter.sources.norm_options import NO_OPTIONS
from sharp.exporter.verification.comparison import INLINED, KERNELS, CaseOutputs, compare
from sharp.exporter.verification.greedy_decoding import check_continuation, continue_as_drafted, continue_greedily
from sharp.exporter.verification.tolerance import PLAIN, tolerance_of
from sharp.exporter.verification.torch_outputs import in_float64, torch_logits, with_rounding_noise
from sharp.exporter.verification.verifier import against_float64, verify
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.loading import load_model_folder
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny


@pytest.mark.parametrize("spoil", ["logits", "stats"])
def test_a_nan_in_the_last_sequence_fails(checkpoint, sharp_export, tmp_path, monkeypatch, spoil):
    sharp_export(checkpoint("ssa", layers=2), "--norm", "ssa", "-o", tmp_path / "out")
    step = PagedSession.step

    def spoiled(session, tokens):
        logits, stats = step(session, tokens)
        (logits if spoil == "logits" else stats)[-1][...] = np.nan
        return logits, stats

    monkeypatch.setattr(PagedSession, "step", spoiled)
    verifier = PagedVerifier(OwnDecoder(tiny_model("ssa", layers=2)), Cache())
    found = verify(verifier, tmp_path / "out", (KERNELS, INLINED), None, int)
    assert not any(comparison.passed for comparison in found.comparisons)


@pytest.fixture
def failed(checkpoint, sharp_export, tmp_path, monkeypatch):
    """Return the failed export of a model, and its folder.

    The entropy of the second layer is NaN wherever the model reads more than one token.
    """
    step = PagedSession.step

    def spoiled(session, tokens):
        logits, stats = step(session, tokens)
        for sequence in stats:
            sequence[1, 1:, :, 0] = np.nan
        return logits, stats

    with monkeypatch.context() as patch:
        patch.setattr(PagedSession, "step", spoiled)
        result = sharp_export(checkpoint("softmax", layers=2), "--norm", "softmax", "-o", tmp_path / "out")
    return result, tmp_path / "out"


def test_a_failure_names_the_first_layer_and_marks_the_folder(failed):
    result, folder = failed
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "differs from PyTorch in 12 of 16 checks, first in 'prompt' (kernels)" in said
    assert "from layer 1 on" in said
    assert "marked as unverified" in said
    report = json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)  # JSON has no NaN
    assert (report["passed"], report["first_wrong_layer"]) == (False, 1)
    manifest = read_manifest(folder)
    assert not manifest.verified
    assert not manifest.verification["passed"]


def test_servers_refuse_an_unverified_folder_unless_told_otherwise(failed):
    _, folder = failed
    config = BackendConfig(threads=1, kernels=False)
    with pytest.raises(InputError, match=r"failed its verification.*--allow-unverified"):
        load_model_folder(folder, config, EngineConfig(cache_tokens=64))
    load_model_folder(folder, replace(config, allow_unverified=True), EngineConfig(cache_tokens=64))


class Amplifying:
    """A stand-in for a model whose float32 logits are off by 2e-4 in one place."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.exact = np.random.default_rng(0).uniform(-1, 1, (5, 8))
        self.exact[0, 0] = 1

    def outputs_of_case(self, error: float) -> CaseOutputs:
        logits = self.exact.copy()
        logits[3, 2] += error
        return CaseOutputs(logits, np.zeros((2, 5, 3)))

    def expected(self, case: str) -> list[CaseOutputs]:
        return [self.outputs_of_case(0.0 if self.model.weight.dtype == torch.float64 else 2e-4)]


@pytest.mark.parametrize(("error", "passes"), [(-6e-4, True), (-9e-4, False), (np.nan, False)])
def test_a_model_that_amplifies_rounding_is_judged_by_its_own_rounding(error, passes):
    verifier = Amplifying()
    expected = {"prompt": verifier.expected("prompt")}
    said = [verifier.outputs_of_case(error)]
    before = compare("kernels", "prompt", said, expected["prompt"])
    assert not before.passed
    (judged,) = against_float64(verifier, expected, [before], {0: said}).values()
    assert judged.rounding is not None
    assert judged.rounding.logits == pytest.approx(2e-4)
    assert judged.tolerance.logits == pytest.approx(8e-4)
    assert judged.passed == passes


class RightByChance(Amplifying):
    """A model whose single run in float32 is exact, while noise of the size of rounding moves a logit by up to 2e-4."""

    def expected(self, case: str) -> list[CaseOutputs]:
        with torch.no_grad():
            weight = self.model.weight.double()
            moved = self.model(torch.ones(1, 1, dtype=self.model.weight.dtype)).double() - self.model.bias - weight
            relative = float((moved / weight).abs())
        return [self.outputs_of_case(2e-4 * min(1.0, relative / 2**-23))]


def test_one_run_that_is_right_by_chance_does_not_make_the_limit_narrow():
    verifier = RightByChance()
    verifier.model.weight.data.fill_(0.7)
    verifier.model.bias.data.zero_()
    expected = {"prompt": verifier.expected("prompt")}
    assert np.array_equal(expected["prompt"][0].logits, verifier.exact)
    said = [verifier.outputs_of_case(4e-4)]
    before = compare("kernels", "prompt", said, expected["prompt"])
    (judged,) = against_float64(verifier, expected, [before], {0: said}).values()
    assert judged.rounding is not None and 1e-4 < judged.rounding.logits <= 2.1e-4
    assert judged.passed
    far = [verifier.outputs_of_case(2e-3)]
    before = compare("kernels", "prompt", far, expected["prompt"])
    (judged,) = against_float64(verifier, expected, [before], {0: far}).values()
    assert not judged.passed


def test_rounding_noise_is_of_the_size_of_rounding_and_ends_with_its_context():
    layer = torch.nn.Linear(8, 64)
    rows = torch.randn(5, 8)
    with torch.no_grad():
        before = layer(rows)
        with with_rounding_noise(layer, 0):
            noisy = layer(rows)
        assert torch.equal(layer(rows), before)
    relative = ((noisy - before) / before).abs()
    assert 0 < relative.max() <= 2.1 * 2**-23 and (relative > 0).float().mean() > 0.3
    assert noisy.dtype == torch.float32


@pytest.mark.parametrize(
    ("places", "error", "passes"), [((3, 2), 0.9, True), (..., 0.1, False), ((3, 2), np.nan, False)]
)
def test_tokens_that_choose_experts_are_judged_by_means_where_numbers_are_rounded(places, error, passes):
    tolerance = tolerance_of(GraphOptions(dtype="bfloat16"), quantized=False, stepwise=True)
    verifier = Amplifying()
    expected = verifier.expected("prompt")
    logits = expected[0].logits.copy()
    logits[places] += error
    said = [replace(expected[0], logits=logits)]
    found = compare("kernels", "prompt", said, expected, tolerance.difference)
    assert found.passed == passes
    if not passes:
        (judged,) = against_float64(verifier, {"prompt": expected}, [found], {0: said}).values()
        assert not judged.passed
    assert tolerance_of(GraphOptions(), quantized=False, stepwise=True) == PLAIN


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("places", "error", "passes"), [((3, 2), 0.1, True), (..., 0.1, False), ((3, 2), 0.9, False)])
def test_a_cache_of_8_bits_is_judged_by_means_too(kv_dtype, places, error, passes):
    tolerance = tolerance_of(GraphOptions(kv_dtype=kv_dtype), quantized=False)
    expected = Amplifying().expected("prompt")
    logits = expected[0].logits.copy()
    logits[places] += error * np.abs(logits).max()
    found = compare("kernels", "prompt", [replace(expected[0], logits=logits)], expected, tolerance.difference)
    assert found.passed == passes


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_weights_are_not_held_to_less_than_the_cache_alone(kv_dtype, quantize):
    options = GraphOptions(kv_dtype=kv_dtype, quantize=quantize)
    before, after = (tolerance_of(options, quantized=quantized).difference for quantized in (False, True))
    tighter = [
        field.name for field in fields(before) if getattr(after, field.name) < getattr(before, field.name) < math.inf
    ]
    assert tighter == []


def test_pytorch_in_float64_is_wide_all_the_way(tmp_path):
    source = read_source(save(tiny("llama"), tmp_path / "llama"), "ssa", NO_OPTIONS)
    assert isinstance(source.model, HookedDecoder)
    tokens = np.arange(3, 33)
    before = {name: weight.clone() for name, weight in source.model.state_dict().items()}
    narrow = torch_logits(source.model, tokens)
    with in_float64(source.model), torch.no_grad():
        wide = PagedVerifier(source.model, Cache()).expected("prompt")[0]
        # Llama's norms cast to float32 explicitly, which would lose a change of 1e-12 in hidden states.
        source.model.model.get_input_embeddings().weight[:] *= 1 + torch.rand(90, 1).double() * 1e-12
        moved = PagedVerifier(source.model, Cache()).expected("prompt")[0]
    assert wide.logits.dtype == np.float64
    assert 0 < np.abs(wide.logits - moved.logits).max() < 1e-9
    for name, weight in source.model.state_dict().items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, before[name], rtol=1e-6, atol=0)
    np.testing.assert_allclose(narrow, torch_logits(source.model, tokens), rtol=1e-4, atol=1e-5)


def test_greedy_tokens_may_differ_by_a_tie_only():
    rows = np.zeros((3, 4), np.float32)
    rows[0, 1], rows[1, 2], rows[2, :] = 1, 1, (0, 0, 1, 1 - 1e-5)
    computed = {"right": np.array([1, 2, 2]), "tie": np.array([1, 2, 3]), "wrong": np.array([1, 0, 2])}
    right, tie, wrong = check_continuation(computed, np.array([5, 6]), lambda tokens: rows, 1e-4)
    assert (right.same, right.tied, right.first_difference, right.passed) == (3, 0, None, True)
    assert (tie.same, tie.tied, tie.first_difference, tie.passed) == (2, 1, 2, True)
    assert (wrong.same, wrong.tied, wrong.first_difference, wrong.passed) == (2, 0, 1, False)


@pytest.mark.parametrize(("wrong", "steps"), [(None, 3), (0, 3 + 33), (20, 3 + 33), (32, 3 + 33)])
def test_a_draft_saves_steps_and_changes_no_token(wrong, steps):
    taken = 0

    def begin():
        seen: list[int] = []

        def append(tokens):
            nonlocal taken
            taken += 1
            rows = []
            for token in tokens.tolist():
                seen.append(token)
                rows.append(np.eye(50)[(3 * sum(seen) + len(seen)) % 50])
            return np.array(rows)

        return append

    prompt = np.array([7, 1, 40])
    continuation = continue_greedily(begin(), prompt, 33)
    draft = continuation.copy()
    if wrong is not None:
        draft[wrong] = (draft[wrong] + 1) % 50
    taken = 0
    assert continue_as_drafted(begin, prompt, draft).tolist() == continuation.tolist()
    assert taken == steps


def test_one_token_may_be_drafted():
    assert continue_as_drafted(lambda: lambda tokens: np.eye(3)[[2] * len(tokens)], np.array([0]), np.array([2])) == [2]


def test_no_runtime_waits_for_one_that_failed(checkpoint, sharp_export, tmp_path, monkeypatch):
    sharp_export(checkpoint("ssa", layers=2), "--norm", "ssa", "-o", tmp_path / "out")
    opened = PagedVerifier.open

    def broken(verifier, folder, *, kernels):
        if kernels:
            raise InputError("broken")
        return opened(verifier, folder, kernels=kernels)

    monkeypatch.setattr(PagedVerifier, "open", broken)
    with pytest.raises(InputError, match="broken"):
        verify(
            PagedVerifier(OwnDecoder(tiny_model("ssa", layers=2)), Cache()),
            tmp_path / "out",
            (KERNELS, INLINED),
            None,
            int,
        )


def test_a_text_that_is_predicted_worse_fails(checkpoint, sharp_export, tmp_path, monkeypatch):
    long = contiguous_verification.CASES["long context"][0].context
    step = ContiguousSession.step

    def spoiled(session, tokens):
        logits, stats = step(session, tokens)
        return (logits * 0.9 if tokens.shape[1] > 100 and tokens.shape[1] != long else logits), stats

    monkeypatch.setattr(ContiguousSession, "step", spoiled)
    options = ("--norm", "ssa", "--untrained-norm", "--cache", "contiguous", "-o", tmp_path / "out")
    result = sharp_export(checkpoint("softmax", layers=2), *options)
    assert result.exit_code == 1
    assert "2 of 16 checks, first in the perplexity of the text (kernels)" in " ".join(result.output.split())
