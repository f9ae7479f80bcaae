"""Training learns, resumes to the same weights, and keeps the last good state."""

import csv
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from sharp.core.errors import InputError, SharpError
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import load_checkpoint
from sharp.models.config import SharpConfig
from sharp.models.text import make_corpus
from sharp.models.train import bits_per_byte, main, sample_windows
from sharp.models.trainer import Stage, TrainSettings, make_optimizer, train

SETTINGS = TrainSettings(
    steps=12,
    batch_tokens=64,
    stages=(Stage(0, 8), Stage(6, 16)),
    warmup_steps=3,
    log_every=2,
    save_every=4,
    validate_every=6,
)
CORPUS = make_corpus("abc", 1.0, ["the cat sat on the mat. "] * 40)


def new_model() -> SharpForCausalLM:
    torch.manual_seed(0)
    return SharpForCausalLM(
        SharpConfig(
            vocab_size=257,
            hidden_size=16,
            intermediate_size=24,
            layers=1,
            q_heads=2,
            kv_heads=1,
            head_dim=8,
            norm="ssa",
            positions="nape",
            trained_context=16,
        )
    )


def sample(sequences, length, generator):
    return sample_windows([CORPUS], sequences, length, generator)


def run(folder, model=None, settings=SETTINGS, stop_after=None, sample=sample) -> SharpForCausalLM:
    model = model or new_model()
    train(model, sample, lambda model: bits_per_byte(model, CORPUS.validation, 16), settings, folder, stop_after)
    return model


def rows(folder):
    with (folder / "loss.csv").open() as file:
        return list(csv.DictReader(file))


def test_weight_decay_leaves_norms_and_parameters_per_head_free():
    model = new_model()
    groups = make_optimizer(model, replace(SETTINGS, weight_decay=0.3)).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    found = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert found == {name: 0.3 if parameter.dim() > 1 else 0.0 for name, parameter in model.named_parameters()}
    assert {0.0, 0.3} == set(found.values())


def test_the_loss_falls(tmp_path):
    settings = replace(SETTINGS, steps=60, learning_rate=1e-2)
    run(tmp_path, settings=settings)
    losses = [float(row["train_loss"]) for row in rows(tmp_path)]
    assert losses[-1] < losses[0] - 1
    assert float(rows(tmp_path)[-1]["validation_bits_per_byte"]) < 5


@pytest.mark.parametrize("stop_after", [4, 7])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, stop_after):
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", stop_after=stop_after)
    resumed = run(tmp_path / "parts")
    for (name, expected), actual in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(actual, expected), name
    assert [row["step"] for row in rows(tmp_path / "parts")] == [row["step"] for row in rows(tmp_path / "whole")]


def test_rows_written_after_the_saved_state_are_not_doubled(tmp_path):
    class Killed(Exception):
        pass

    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 8:  # steps 5 and 6 are logged, but step 4 is the last that was saved
            raise Killed
        return sample(*arguments)

    with pytest.raises(Killed):
        run(tmp_path, sample=failing)
    run(tmp_path)
    assert [int(row["step"]) for row in rows(tmp_path)] == [2, 4, 6, 8, 10, 12]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path):
    model = new_model()

    def breaking(sequences, length, generator):
        if length == 16:
            model.norm.weight.data.fill_(torch.nan)
        return sample(sequences, length, generator)

    with pytest.raises(SharpError, match="not finite at step 6"):
        run(tmp_path, model, sample=breaking)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 4
    assert all(
        parameter.isfinite().all() for parameter in load_checkpoint(tmp_path / "latest.safetensors").parameters()
    )


@pytest.mark.parametrize("stop_after", [None, 5, 8])
@pytest.mark.parametrize(
    ("best", "scores", "step"), [(max, (3, 7, 7, 5), 6), (min, (9, 8, 2, 4), 6), (max, (1, 2, 3, 4), 8)]
)
def test_the_best_validation_is_kept(tmp_path, best, scores, step, stop_after):
    """The weights of the best validation are kept, the later of two equal ones, also if a run is killed and resumed."""
    settings = replace(SETTINGS, steps=8, validate_every=2, save_every=2)
    seen = {}

    def validate_at(first):
        found = iter(range(first, 9, 2))

        def validate(model):
            at = next(found)
            seen[at] = {name: value.clone() for name, value in model.state_dict().items()}
            return float(scores[at // 2 - 1])

        return validate

    model = new_model()
    train(model, sample, validate_at(2), settings, tmp_path, stop_after, best=best)
    if stop_after is not None:
        model = new_model()
        train(model, sample, validate_at(stop_after // 2 * 2 + 2), settings, tmp_path, best=best)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, seen[step][name], rtol=1e-3, atol=1e-4)  # saved as float16
    if step != 8:
        assert any((value - seen[8][name]).abs().max() > 1e-3 for name, value in model.state_dict().items())


def test_a_run_with_other_settings_is_not_continued(tmp_path):
    run(tmp_path, stop_after=4)
    with pytest.raises(InputError, match="other settings"):
        run(tmp_path, settings=replace(SETTINGS, learning_rate=1.0))


def test_learning_rate_warms_up_and_falls():
    rates = [SETTINGS.learning_rate_at(step) for step in range(SETTINGS.steps)]
    assert rates[:3] == pytest.approx([SETTINGS.learning_rate * share for share in (1 / 3, 2 / 3, 1)])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] >= SETTINGS.final_learning_rate


def test_bits_per_byte_of_a_model_that_knows_nothing_is_log2_of_the_vocabulary():
    model = new_model()
    torch.nn.init.zeros_(model.embedding.weight)
    assert bits_per_byte(model, torch.arange(40), 8) == pytest.approx(8.0056, abs=1e-3)


def test_help_names_the_norms():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "asentmax" in result.output
