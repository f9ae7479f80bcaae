"""The adaptive temperature's polynomial, fitted to a model (App. F of the paper)."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sharp.core.errors import InputError
from sharp.exporter.temperature.cli import fit_temperature
from sharp.models import evaluate, train
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import read_checkpoint, save_checkpoint
from sharp.models.config import SharpConfig
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.max_retrieval import MaxRetrieval, MaxRetrievalConfig
from sharp.models.number_sequence import SharpForNumbers
from sharp.models.objective import TrainingBatch
from sharp.models.tasks import scoring
from sharp.models.tasks.largest_item import LargestItem
from sharp.models.temperature_data import check_recorded, measure_effect
from sharp.models.temperature_fit import (
    TEMPERATURES,
    Points,
    at_temperature,
    best_inverse_temperature,
    fit_polynomial,
    language_points,
    max_retrieval_points,
)
from sharp.models.temperature_preset import AdaptiveTemperature, read_temperature
from sharp.plugins.op.schema import TEMPERATURE_PRESETS
from sharp.plugins.op.torch_normalizers import entropy

TRAINED = Path(__file__).parents[2] / "models" / "checkpoints" / "max-retrieval-softmax.safetensors"


def language_model(positions="nape", **changes) -> SharpForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 4}
    config = SharpConfig(vocab_size=257, norm="softmax", positions=positions, tokenizer="bytes", **sizes)
    model = SharpForCausalLM(replace(config, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model.eval()


def fit(*arguments):
    result = CliRunner().invoke(fit_temperature, [str(argument) for argument in (*arguments, "--threads", 1)])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("coefficients", [TEMPERATURE_PRESETS[name] for name in ("icml2025", "arxiv2024")])
def test_data_from_a_polynomial_gives_it_back(coefficients):
    entropies = np.linspace(0.6, 5.5, 50)
    found = fit_polynomial(Points(entropies, np.polyval(coefficients, entropies), 50, 50))
    assert found == pytest.approx(coefficients, rel=1e-8)


def test_the_best_temperature_is_the_known_one():
    # Of logits 1, -1 and tanh(1 / theta), the third has its largest weight at the temperature theta, where it equals
    # the mean logit.
    thetas = torch.tensor(TEMPERATURES, dtype=torch.float64)
    logits = torch.stack([torch.ones_like(thetas), -torch.ones_like(thetas), torch.tanh(1 / thetas)], dim=1)
    known = thetas >= 0.2  # below 0.2, tanh(1 / theta) cannot be told from 1
    found = best_inverse_temperature(logits[known], torch.full((int(known.sum()),), 2))
    torch.testing.assert_close(found.double(), 1 / thetas[known])


def test_sets_whose_maximum_has_the_largest_logit_are_left_out():
    model = read_checkpoint(TRAINED).model
    batch = LargestItem().sample(50, 1000, torch.Generator().manual_seed(0))
    points = max_retrieval_points(model, [batch], lambda: None)
    expected = []
    for items, query in zip(*batch.inputs, strict=True):
        logits = model.attention_logits(items[None], query[None])[0][0].double()
        target = items[:, 0].argmax()
        if logits.argmax() != target:
            weights = [torch.softmax(logits / theta, 0)[target].item() for theta in TEMPERATURES]
            best = TEMPERATURES[max(range(len(weights)), key=weights.__getitem__)]
            expected.append((entropy(torch.softmax(logits, 0)).item(), 1 / best))
    assert 0 < len(expected) < 50
    assert (points.samples, points.generated) == (len(expected), 50)
    np.testing.assert_allclose(points.entropy, [one for one, _ in expected], rtol=1e-4)
    np.testing.assert_allclose(points.inverse_temperature, [one for _, one in expected], rtol=0.02)


@pytest.mark.parametrize("positions", ["none", "rope", "alibi", "nape"])
@pytest.mark.parametrize("theta", [0.3, 0.8])
def test_one_temperature_in_all_heads_is_adaptive_temperature_with_a_constant(positions, theta):
    model = language_model(positions)
    tokens = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(0))
    constant = {"temperature_coefficients": (1 / theta,), "entropy_threshold": 0.0}
    adaptive = SharpForCausalLM(replace(model.config, norm="adaptive-temperature", **constant)).eval()
    adaptive.load_state_dict(model.state_dict())
    found = model(tokens, attention=at_temperature(model.config, theta))
    torch.testing.assert_close(found, adaptive(tokens), rtol=1e-3, atol=1e-3)


def test_every_head_with_entropy_gives_a_point_of_its_position():
    model = language_model()
    tokens = torch.randint(257, (1, 9), generator=torch.Generator().manual_seed(1))
    targets = torch.full((1, 8), -100)
    targets[0, 6:] = tokens[0, 7:]
    runs = []
    points = language_points(model, [TrainingBatch((tokens[:, :-1],), targets)], 0.0, lambda: runs.append(1))
    assert (points.samples, points.generated, len(runs)) == (2, 2, len(TEMPERATURES))
    assert len(points.entropy) == 2 * model.config.layers * model.config.q_heads
    probabilities = torch.stack(
        [model(tokens[:, :-1], attention=at_temperature(model.config, theta)).softmax(-1) for theta in TEMPERATURES]
    )
    for place, position in enumerate((6, 7)):
        best = probabilities[:, 0, position, tokens[0, position + 1]].argmax()
        inverses = points.inverse_temperature.reshape(2, -1)[place]
        np.testing.assert_allclose(inverses, 1 / TEMPERATURES[best], rtol=1e-6)


def test_from_a_trained_model_to_an_evaluation(tmp_path):
    stored = read_checkpoint(TRAINED)
    torch.manual_seed(0)
    with torch.no_grad():  # noise makes the model err on short sets, as the trained model does on long ones
        for parameter in stored.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25 * parameter.std())
    model, preset = tmp_path / "errs.pt", tmp_path / "fit.json"
    save_checkpoint(model, stored.model, task=stored.task, task_parameters=stored.task_parameters)
    code, output = fit(model, "--lengths", "64,256", "--samples", 60, "-o", preset)
    assert code == 0, output
    assert "of 120 samples" in output
    assert "softmax accuracy" in output
    assert "this polynomial accuracy" in output
    content = json.loads(preset.read_text())
    assert content["source"] == "errs.pt"
    assert content["data"].startswith("LargestItem(classes=10), lengths 64, 256, 60 samples")
    assert len(content["temperature_coefficients"]) == 5
    assert 0 < content["samples"] < 120
    low, high = content["entropy_range"]
    assert 0 < low < high < math.log(256)
    assert preset.with_suffix(".png").stat().st_size > 10_000
    assert read_temperature(str(preset)).coefficients == tuple(content["temperature_coefficients"])

    presets = [tmp_path / f"{beta}.json" for beta in (1.0, 9.0)]
    for constant in presets:
        constant.write_text(json.dumps(content | {"temperature_coefficients": [float(constant.stem)]}))
    scores = []
    for options in ((), *(("--temperature-coefficients", value) for value in (*presets, preset))):
        arguments = (model, "--lengths", 256, "--samples", 100, "--threads", 1, "--output", tmp_path / "found.json")
        result = CliRunner().invoke(evaluate.main, [str(argument) for argument in (*arguments, *options)])
        assert result.exit_code == 0, result.output
        scores.append(json.loads((tmp_path / "found.json").read_text())[0]["score"])
    assert scores[0] == scores[1]  # beta = 1 everywhere is softmax
    assert scores[0] != scores[2]


def test_a_language_model_is_fitted_to_a_text(tmp_path):
    save_checkpoint(tmp_path / "lm.pt", language_model())
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 20)
    arguments = (tmp_path / "lm.pt", "--text", tmp_path / "text.txt", "--lengths", 16, "--samples", 3)
    code, output = fit(*arguments, "-o", tmp_path / "lm.json")
    assert code == 0, output
    content = json.loads((tmp_path / "lm.json").read_text())
    assert content["data"] == "text.txt, windows of 16, 3 samples of each length, seed 0"
    assert content["entropy_range"][0] > 0.5
    losses = [float(found) for found in re.findall(r"cross entropy ([\d.]+) nats", output)]
    assert len(losses) == 3
    assert ("worse than plain softmax" in output) == (losses[2] > losses[0])


def test_a_model_of_a_token_task_is_fitted_to_its_task(tmp_path):
    options = ("--layers", 1, "--heads", 2, "--hidden-size", 16, "--lengths", "2-6", "--batch", 8, "--steps", 10)
    files = ("--work", tmp_path / "work", "--output", tmp_path / "sort.pt", "--set", "symbols=5", "--threads", 1)
    result = CliRunner().invoke(
        train.main, [str(argument) for argument in ("sort", "--norm", "softmax", *options, *files)]
    )
    assert result.exit_code == 0, result.output
    code, output = fit(tmp_path / "sort.pt", "--lengths", "8", "--samples", 4, "-o", tmp_path / "sort.json")
    assert code == 0, output
    data = json.loads((tmp_path / "sort.json").read_text())["data"]
    assert data == "Rearrange(order='sort', symbols=5), lengths 8, 4 samples of each length, seed 0"


def test_the_effect_of_a_temperature_is_measured_on_all_targets():
    model, targets = language_model(), torch.full((1, 8), -100)
    tokens = torch.randint(257, (1, 8), generator=torch.Generator().manual_seed(1))
    targets[0, 5:] = 7
    targets[0, 5] = model(tokens)[0, 5].argmax()
    batches = [TrainingBatch((tokens,), targets), TrainingBatch((tokens[:, :6],), targets[:, :6])]  # 3 and 1 targets
    logs = [model(*batch.inputs)[0, 5:].log_softmax(-1).gather(1, batch.targets[0, 5:, None]) for batch in batches]
    effect = measure_effect(model, iter(batches), None)
    assert effect.cross_entropy == pytest.approx(-torch.cat(logs).mean().item(), rel=1e-5)
    assert effect.accuracy == 0.5
    sharp = model(tokens, attention=at_temperature(model.config, 0.5))[0, 5:].log_softmax(-1)
    effect = measure_effect(model, iter(batches[:1]), AdaptiveTemperature((2.0,), 0.0))
    assert effect.cross_entropy == pytest.approx(-sharp.gather(1, targets[0, 5:, None]).mean().item(), rel=1e-3)


def other_model(kind):
    config = language_model().config
    return {
        "ssa": lambda: MaxRetrieval(MaxRetrievalConfig(norm="ssa")),
        "ssa text": lambda: SharpForCausalLM(replace(config, norm="ssa")),
        "encoder": lambda: SharpForMaskedLM(replace(config, causal=False)),
        "numbers": lambda: SharpForNumbers(replace(config, tie_embeddings=False, tokenizer="none")),
        "no bytes": lambda: SharpForCausalLM(replace(config, tokenizer="none")),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ssa", "trained with softmax; this one has norm ssa"),
        ("ssa text", "trained with softmax; this one has norm ssa"),
        ("encoder", "no best temperature is defined for a SharpForMaskedLM"),
        ("numbers", "no best temperature is defined for a SharpForNumbers"),
        ("no bytes", "a text is for language models over bytes"),
    ],
)
def test_models_that_have_no_best_temperature_are_refused(tmp_path, kind, message):
    save_checkpoint(tmp_path / "other.pt", other_model(kind))
    code, output = fit(tmp_path / "other.pt", "-o", tmp_path / "fit.json")
    assert code == 2
    assert message in output
    assert not (tmp_path / "fit.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lengths", "16", "--samples", 3), "raise --samples or --lengths"),
        (("--lengths", "16,many"), "numbers with commas"),
        (("--lengths", "0"), "at least 1"),
        (("--set", "classes=4"), "give the parameters of its training"),
        (("--text", "book.txt"), "reads no text"),
        (("-o", "fit.yaml"), "must end in .json"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, options, message):
    code, output = fit(TRAINED, "-o", tmp_path / "fit.json", *options)
    assert code == 2
    assert message in output
    assert list(tmp_path.iterdir()) == []


def test_too_few_points_are_refused():
    with pytest.raises(InputError, match="only 4 of 9 samples"):
        fit_polynomial(Points(np.arange(4.0), np.ones(4), 4, 9))


def test_weights_of_a_layer_must_fit_into_memory(monkeypatch) -> None:
    config = SharpConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, layers=3, q_heads=2, kv_heads=1, head_dim=4, norm="softmax"
    )
    model, needed = SharpForCausalLM(config), 4 * 5 * 2 * 100 * 100
    monkeypatch.setattr(scoring, "memory_of", lambda _: needed)
    check_recorded(model.config, 100)
    monkeypatch.setattr(scoring, "memory_of", lambda _: needed - 1)
    with pytest.raises(InputError, match="length 100 needs about"):
        check_recorded(model.config, 100)
