"""`python -m sharp.models.train` and `evaluate` as commands."""

import csv
import json
import math
import resource
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from sharp.core.errors import InputError
from sharp.models import evaluate, train
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Checkpoint, describe, read_checkpoint, save_checkpoint
from sharp.models.evaluation import sampler_of
from sharp.models.norms import NORMS
from sharp.models.objective import loss
from sharp.models.tasks.registry import get_task
from sharp.models.tasks.scoring import Score
from tests.models.tiny_task import sample, tiny


def command(main, *arguments):
    """Run a command; return its exit code and its output as one line.

    The command uses one thread, because two threads that share a busy core are far slower.
    """
    result = CliRunner().invoke(main, [str(argument) for argument in (*arguments, "--threads", 1)])
    return result.exit_code, " ".join(result.output.split())


def sort_run(folder, *options):
    sizes = ("--layers", 1, "--heads", 2, "--hidden-size", 16, "--lengths", "2-6", "--batch", 8, "--steps", 12)
    files = ("--work", folder / "work", "--output", folder / "sort.safetensors")
    return command(train.main, "sort", "--norm", "entmax", *sizes, *files, "--set", "symbols=5", *options)


def test_n_of_ssa_can_be_fixed(tmp_path):
    code, output = sort_run(tmp_path, "--norm", "ssa", "--ssa-n", 2)
    assert code == 0, output
    (parameters,) = (
        block.attention.head_parameters for block in read_checkpoint(tmp_path / "sort.safetensors").model.blocks
    )
    b, n = parameters().T
    torch.testing.assert_close(n, torch.full_like(n, 2.0))
    assert (b != 1).all()  # b is trained, so it has left its initial value
    code, output = sort_run(tmp_path, "--ssa-n", 2)
    assert code == 2 and "norm entmax has no n to fix" in output
    code, output = sort_run(tmp_path, "--norm", "ssa", "--ssa-n", 0.5)
    assert code == 2 and "--ssa-n is 0.5, but must be from 1" in output


def test_training_and_evaluation_from_the_command_line(tmp_path):
    code, output = sort_run(tmp_path)
    assert code == 0, output
    with (tmp_path / "sort.loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[-1]["step"] == "12"
    assert rows[-1]["sequences"] == "96"
    assert 0 <= float(rows[-1]["validation_exact_match"]) <= 1
    assert (tmp_path / "work" / "loss.png").stat().st_size > 1000

    stored = read_checkpoint(tmp_path / "sort.safetensors")
    assert (stored.task, stored.task_parameters, stored.model.config.norm) == ("sort", {"symbols": 5}, "entmax")
    assert read_checkpoint(tmp_path / "work" / "latest.safetensors").task_parameters == {"symbols": 5}
    found_file = tmp_path / "found.json"
    arguments = (tmp_path / "sort.safetensors", "--lengths", "2,4", "--samples", 20, "--output", found_file)
    code, output = command(evaluate.main, *arguments)  # with symbols=5, as in training
    assert code == 0, output
    found = json.loads(found_file.read_text())
    assert [(row["task"], row["length"], row["samples"]) for row in found] == [("sort", 2, 20), ("sort", 4, 20)]
    assert found_file.with_suffix(".png").stat().st_size > 1000

    code, output = command(evaluate.main, *arguments, "--norm", "log-power")
    assert code == 2 and "log-power is for models that were trained with softmax" in output

    code, output = command(evaluate.main, *arguments, "--set", "symbols=6")
    assert code == 2
    assert "give the parameters of its training with --set" in output
    code, output = command(evaluate.main, *arguments, "--norm", "adaptive-temperature")
    assert code == 2
    assert "trained with softmax" in output


def test_the_checkpoint_is_the_best_at_another_length(tmp_path, monkeypatch):
    asked = []

    def score(model, sampler, metric, length, samples, seed):
        asked.append((length, samples))
        # the third of 12 validations is the best; the last call is the score that is printed
        return Score({3: 0.9}.get(len(asked), 0.1), 0.0)

    monkeypatch.setattr(train, "score", score)
    code, output = sort_run(tmp_path, "--validation-length", 48, "--validation-samples", 7)
    assert code == 0, output
    assert set(asked) == {(48, 7)} and "exact_match at 48 tokens" in output
    best, written = (
        read_checkpoint(path).model.state_dict()
        for path in (tmp_path / "work" / "best.safetensors", tmp_path / "sort.safetensors")
    )
    last = read_checkpoint(tmp_path / "work" / "latest.safetensors").model.state_dict()
    assert all(torch.equal(written[name], value) for name, value in best.items())
    assert not all(torch.equal(written[name], value) for name, value in last.items())
    for options in ((), ("--validation-length", 48)):
        code, output = sort_run(tmp_path, *options)
        assert code == 2 and "other settings" in output
    code, output = sort_run(tmp_path / "odd", "--validation-length", 0)
    assert code == 2 and "--validation-length" in output


def test_a_length_that_a_task_does_not_have_is_no_validation(tmp_path):
    code, output = command(train.main, "flip-flop-dense", "--validation-length", 33, "--work", tmp_path)
    assert code == 2 and "length is 33, but must be an even number" in output


def test_parameters_of_a_checkpoint_are_for_its_own_task_only():
    _, model = tiny("sort")
    stored = Checkpoint(model, "sort", {"symbols": 5})
    assert sampler_of(get_task("sort"), stored).symbols == 5
    assert sampler_of(get_task("sort"), stored, ("symbols=9",)).symbols == 9
    assert sampler_of(get_task("reverse"), stored) == get_task("reverse").sampler


@pytest.mark.parametrize("parameters", [{"colours": 5}, {"symbols": "many"}, {"symbols": 2.5}, {"outputs": 3}])
def test_parameters_of_a_checkpoint_that_this_version_does_not_know(parameters):
    _, model = tiny("sort")
    with pytest.raises(InputError, match=rf"task parameter {next(iter(parameters))} = .* cannot be used"):
        sampler_of(get_task("sort"), Checkpoint(model, "sort", parameters))


def test_task_parameters_that_are_no_object(tmp_path):
    task, model = tiny("sort")
    described = json.dumps(describe(model) | {"task": task.name, "task_parameters": [5]})
    save_file(model.state_dict(), tmp_path / "sort.safetensors", metadata={"sharp": described})
    with pytest.raises(InputError, match="or its task_parameters no object"):
        read_checkpoint(tmp_path / "sort.safetensors")


def test_a_text_is_measured_in_bits_per_byte(tmp_path):
    torch.manual_seed(0)
    model = SharpForCausalLM(replace(train.text_config("softmax"), hidden_size=32, layers=1, intermediate_size=32))
    torch.nn.init.zeros_(model.lm_head.weight)  # makes every token equally likely
    save_checkpoint(tmp_path / "lm.pt", model)
    (tmp_path / "text.txt").write_text("a text of some bytes " * 20)
    arguments = (tmp_path / "lm.pt", "--text", tmp_path / "text.txt", "--output", tmp_path / "lm.csv")
    code, output = command(evaluate.main, *arguments, "--lengths", "16,64")
    assert code == 0, output
    with (tmp_path / "lm.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["task"], row["length"], row["metric"]) for row in rows] == [
        ("text", "16", "bits_per_byte"),
        ("text", "64", "bits_per_byte"),
    ]
    assert [int(row["samples"]) for row in rows] == [420 // 16, 420 // 64]
    for row in rows:
        assert float(row["score"]) == pytest.approx(math.log2(257), rel=1e-5)
    for options, message in (
        (("--lengths", "421"), "cannot be cut from a text of 421 tokens"),
        (("--set", "colour=1"), "a text has no parameters"),
        (("--text", tmp_path / "no.txt"), "does not exist"),
    ):
        code, output = command(evaluate.main, *arguments, *options)
        assert code == 2
        assert message in output


def test_a_text_is_for_language_models_over_bytes(tmp_path):
    task, model = tiny("max-retrieval")
    save_checkpoint(tmp_path / "max.pt", model, task=task.name)
    code, output = command(evaluate.main, tmp_path / "max.pt", "--task", "text")
    assert code == 2
    assert "a text is for language models over bytes" in output


def test_a_run_goes_on_only_with_its_own_settings(tmp_path):
    assert sort_run(tmp_path)[0] == 0
    assert sort_run(tmp_path)[0] == 0
    for options in (("--learning-rate", 0.5), ("--set", "order=reverse")):
        code, output = sort_run(tmp_path, *options)
        assert code == 2
        assert "other settings" in output
    code, output = sort_run(tmp_path, "--learning-rate", 0)
    assert code == 2
    assert "learning_rate is 0.0, but must be above 0" in output


def test_head_counts_that_cannot_work_are_refused(tmp_path):
    code, output = command(train.main, "sort", "--heads", 3, "--work", tmp_path)
    assert code == 2
    assert "hidden size 256 cannot be divided among 3 heads" in output


@pytest.mark.parametrize(
    "size", [("--hidden-size", 10**8), ("--hidden-size", 2**31 - 16), ("--intermediate-size", 10**9)]
)
def test_a_model_that_does_not_fit_into_memory_is_refused(tmp_path, size):
    code, output = command(train.main, "mqmtar", *size, "--work", tmp_path)
    assert code == 2
    assert "choose" in output
    assert "smaller" in output


@pytest.mark.parametrize("size", [100, 3000, 100_000])
def test_a_disk_that_is_full_is_one_sentence(tmp_path, size):
    """A full disk ends training with one sentence and leaves no `state.pt.partial`. Once it was a traceback."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a file-size limit makes the same writes fail as a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        code, output = sort_run(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and "Error: " in output and "File too large" in output
    assert not list(tmp_path.rglob("*.partial")) and not (tmp_path / "sort.safetensors").exists()
    assert sort_run(tmp_path)[0] == 0  # a second run in the same place succeeds


def test_a_loss_that_is_not_finite_names_its_step(tmp_path):
    code, output = sort_run(tmp_path, "--learning-rate", 1e30)
    assert code == 2
    assert "the loss is not finite at step" in output
    assert "nothing was saved yet" in output


@pytest.mark.parametrize("option", ["--layers", "--validation-length", "--validation-samples"])
def test_text_takes_no_options_of_tasks(tmp_path, option):
    code, output = command(train.main, "text", "--no-compile", option, 2, "--work", tmp_path)
    assert code == 2
    assert "leave out --set and what follows it" in output


def test_a_sweep_varies_a_parameter(tmp_path):
    task, model = tiny("linear-functions")
    save_checkpoint(tmp_path / "line.pt", model, task=task.name)
    found_file = tmp_path / "line.csv"
    code, output = command(
        evaluate.main, tmp_path / "line.pt", "--samples", 5, "--sweep", "function_sigma=1,10", "--output", found_file
    )
    assert code == 0, output
    with found_file.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["length"], row["sweep"], row["value"]) for row in rows] == [
        ("40", "function_sigma", "1.0"),
        ("40", "function_sigma", "10.0"),
    ]
    assert float(rows[1]["score"]) > 10 * float(rows[0]["score"])


def test_a_sweep_varies_a_whole_number(tmp_path):
    task, model = tiny("2back")
    save_checkpoint(tmp_path / "back.pt", model, task=task.name)
    options = ("--samples", 2, "--lengths", 16, "--sweep", "back=1,3", "--output", tmp_path / "back.json")
    code, output = command(evaluate.main, tmp_path / "back.pt", *options)
    assert code == 0, output
    assert [row["value"] for row in json.loads((tmp_path / "back.json").read_text())] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lengths", "16,many"), "numbers with commas"),
        (("--lengths", "2.5"), "whole numbers"),
        (("--lengths", "0"), "at least 1"),
        (("--sweep", "colour=1,2"), "its parameters are: classes"),
        (("--sweep", "classes=3"), "the task 3; give the parameters of its training"),
        (("--output", "found.txt"), "must end in .csv or .json"),
        (("--output", "file/found.csv"), "the folder of file/found.csv cannot be made"),
        (("--task", "sort"), "is not for a MaxRetrieval"),
        (("--text", "file"), "only language models over bytes read a text"),
        (("--seed", str(2**63)), "is not in the range"),
    ],
)
def test_evaluation_says_what_is_wrong_with_its_options(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    # Bad arguments are refused before anything is measured, which may take hours.
    monkeypatch.setattr("sharp.models.evaluation.score", None)
    task, model = tiny("max-retrieval")
    save_checkpoint(tmp_path / "max.pt", model, task=task.name)
    code, output = command(evaluate.main, tmp_path / "max.pt", "--samples", 2, "--lengths", "4", *options)
    assert code == 2
    assert message in output


def test_a_checkpoint_without_a_task_needs_one_named(tmp_path):
    _, model = tiny("max-retrieval")
    save_checkpoint(tmp_path / "max.pt", model)
    code, output = command(evaluate.main, tmp_path / "max.pt", "--samples", 2, "--lengths", "4")
    assert code == 2
    assert "give one with --task" in output


def test_every_norm_of_the_registry_can_be_trained_on_sequences():
    for norm in NORMS:
        temperature = 0.5 if norm == "fixed-temperature" else None
        task, model = tiny("2back", norm, lengths=(4, 4), temperature=temperature)
        batch = sample(task.sampler, 4, 2)
        loss(model(*batch.inputs), batch.targets).backward()


def test_training_begins_with_the_weights_of_a_checkpoint_of_another_norm(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    sizes = ["--hidden-size", "8", "--steps", "10"]
    arguments = ("max-retrieval", "--norm", "softmax", *sizes, "--output", first, "--work", tmp_path / "a")
    assert command(train.main, *arguments)[0] == 0
    options = ["--learning-rate", "1e-12", "--final-learning-rate", "0", "--start-from", first]
    arguments = ("max-retrieval", "--norm", "ssa", *sizes, *options, "--output", second, "--work", tmp_path / "b")
    code, output = command(train.main, *arguments)
    assert code == 0, output
    before, after = (read_checkpoint(path).model.state_dict() for path in (first, second))
    assert set(after) - set(before) == {"head_parameters.b_raw", "head_parameters.n_raw"}
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor)


def test_a_checkpoint_of_another_size_is_no_beginning(tmp_path):
    first = tmp_path / "first.safetensors"
    sizes = ["--steps", "10", "--work", tmp_path / "work", "--output", first]
    assert command(train.main, "max-retrieval", "--norm", "softmax", "--hidden-size", "8", *sizes)[0] == 0
    code, output = command(
        train.main,
        "max-retrieval",
        "--norm",
        "softmax",
        "--hidden-size",
        "16",
        "--start-from",
        first,
        "--work",
        tmp_path,
    )
    assert (code, "does not fit the model" in output) == (2, True)


def test_what_is_wrong_goes_to_stderr_and_a_hint_to_stdout(tmp_path, monkeypatch):
    wrong = CliRunner().invoke(train.main, ["sort", "--norm", "entmax", "--lengths", "9-8", "--steps", "10"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("Error: ")
    monkeypatch.setattr(train, "plot_losses", lambda *_: "install matplotlib for a plot")
    code, output = sort_run(tmp_path)
    assert code == 0, output
    assert output.endswith("install matplotlib for a plot")
