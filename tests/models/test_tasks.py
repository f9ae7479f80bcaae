"""Samples of every task follow its paper: simple solvers that share no code with the tasks compute the same targets."""

import pytest
import torch

from sharp.core.errors import InputError
from sharp.models.objective import IGNORED, loss
from sharp.models.tasks import scoring
from sharp.models.tasks.associative_recall import AssociativeRecall
from sharp.models.tasks.in_context import LinearFunction, Quantifier
from sharp.models.tasks.largest_item import LargestItem
from sharp.models.tasks.memory import FlipFlop, LocalCount, TwoBack
from sharp.models.tasks.rearrange import Rearrange
from sharp.models.tasks.recipe import Choices, choose_task, make_settings, with_parameters
from sharp.models.tasks.registry import TASKS, get_task
from sharp.models.tasks.scoring import sample_scores, score
from tests.models.tiny_task import generator, sample, tiny


def asked(inputs: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
    """Return the question of one sample of a token task, up to and with the marker, and the expected answer."""
    first = next(place for place, target in enumerate(targets) if target != IGNORED)
    assert all(target != IGNORED for target in targets[first:])
    assert inputs[first + 1 :] == targets[first:-1]  # the inputs go on with the beginning of the answer
    return inputs[: first + 1], targets[first:]


@pytest.mark.parametrize("name", TASKS)
def test_samples_depend_on_the_seed_alone(name):
    task = TASKS[name]
    length = task.longest_training_length
    first, again, other = (sample(task.sampler, length, 4, seed) for seed in (1, 1, 2))
    for left, right in zip((*first.inputs, first.targets), (*again.inputs, again.targets), strict=True):
        assert torch.equal(left.nan_to_num(), right.nan_to_num())
    assert not torch.equal(first.inputs[0], other.inputs[0])
    torch.manual_seed(0)
    assert torch.equal(sample(task.sampler, length, 4, 1).inputs[0], first.inputs[0])


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_has_as_many_positions_as_announced(name):
    task = TASKS[name]
    for length in (task.training.stages[0].length, task.longest_training_length, min(task.evaluation_lengths)):
        batch = sample(task.sampler, length, 2)
        assert batch.inputs[0].shape[:2] == (2, task.sampler.tokens(length))
        if task.model == "tokens":
            assert batch.inputs[0].max() < task.sampler.outputs
            assert batch.targets.max() < task.sampler.outputs


# Steps, samples per step, learning rate, (first, last) length of training, and (first, last, number of) lengths of
# evaluation.
RECIPES = {
    "max-retrieval": (100_000, 128, 1e-3, (5, 16), (16, 16_384, 11)),
    "mqmtar": (390_625, 128, 2e-4, (32, 64), (64, 65_536, 11)),
    "copy": (156_250, 128, 1e-3, (32, 64), (64, 4096, 7)),
    "reverse": (234_375, 128, 4e-4, (32, 64), (64, 512, 4)),
    "sort": (312_500, 128, 4e-4, (32, 64), (64, 512, 4)),
    "2back": (78_125, 128, 4e-4, (32, 64), (64, 4096, 7)),
    "local-count": (78_125, 128, 4e-4, (64, 128), (128, 4096, 6)),
    "flip-flop-sparse": (78_125, 128, 4e-4, (32, 64), (64, 32_768, 10)),
    "flip-flop-dense": (78_125, 128, 4e-4, (32, 64), (64, 4096, 7)),
    "every": (500_000, 64, 1e-4, (3, 40), (10, 200, 4)),
    "some": (500_000, 64, 1e-4, (3, 40), (10, 200, 4)),
    "linear-functions": (500_000, 64, 1e-4, (3, 40), (40, 40, 1)),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_trained_and_evaluated_as_its_paper_says(name):
    task = TASKS[name]
    training, tested = task.training, task.evaluation_lengths
    lengths = (training.stages[0].length, task.longest_training_length)
    found = (training.steps, training.batch, training.learning_rate, lengths, (tested[0], tested[-1], len(tested)))
    assert found == RECIPES[name]
    assert training.stages[0].start_step == 0


def test_what_does_not_fit_the_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(scoring, "memory_of", lambda _: 3 * 2**30)
    scoring.check_memory(2**27, 512, torch.device("cpu"))  # needs 2.5 GiB
    with pytest.raises(InputError, match="length 512 needs about 20 GiB for one sample, there are 3;"):
        scoring.check_memory(2**30, 512, torch.device("cpu"))


@pytest.mark.parametrize(("order", "solve"), [("copy", list), ("reverse", lambda x: x[::-1]), ("sort", sorted)])
def test_rearranged_symbols(order, solve):
    batch = sample(Rearrange(order), 33)
    for inputs, targets in zip(batch.inputs[0].tolist(), batch.targets.tolist(), strict=True):
        question, answer = asked(inputs, targets)
        assert question[-1] == answer[-1] == 32
        assert answer[:-1] == solve(question[:-1])
    assert set(batch.inputs[0].flatten().tolist()) == set(range(33))


@pytest.mark.parametrize("length", [32, 64, 4096])
def test_associative_recall_finds_the_values_of_its_keys(length):
    batch = sample(AssociativeRecall(), length, 6)
    for inputs, targets in zip(batch.inputs[0].tolist(), batch.targets.tolist(), strict=True):
        question, answer = asked(inputs, targets)
        context, queries = question[:length], question[length:-1]
        values, place = {}, 0
        while place < length:
            if context[place] == 0:
                place += 1
            else:
                first, second, delimiter, *value = context[place : place + 5]
                assert delimiter == 1
                assert (first, second) not in values
                values[first, second] = value
                place += 5
        assert len(values) == length * 8 // 10 // 5
        expected = []
        for start in range(0, 12, 3):
            delimiter, first, second = queries[start : start + 3]
            assert delimiter == 3
            expected += [3, *values[first, second]]
        assert answer == [*expected, 2]
        assert question[-1] == 2


def test_associative_recall_of_other_sizes():
    sampler = AssociativeRecall(alphabet=5, key_tokens=1, value_tokens=3, queries=2, density=1.0)
    inputs = sample(sampler, 10, 50).inputs[0]
    assert not (inputs[:, :10] == 0).any()
    assert (inputs[:, 0] != inputs[:, 5]).all()  # positions 0 and 5 hold the two keys
    assert inputs[:, 0].unique().tolist() == [4, 5, 6, 7, 8]


def test_two_back_says_the_symbol_two_positions_earlier():
    batch = sample(TwoBack(), 40)
    for inputs, targets in zip(batch.inputs[0].tolist(), batch.targets.tolist(), strict=True):
        assert inputs[0] == 0
        assert targets == [IGNORED, 0, *inputs[:-2]]
    assert set(batch.inputs[0].flatten().tolist()) == set(range(17))


def test_local_count_counts_within_the_cluster():
    batch = sample(LocalCount(), 200)
    for inputs, targets in zip(batch.inputs[0].tolist(), batch.targets.tolist(), strict=True):
        count, expected = 0, []
        for place, word in enumerate(inputs):
            count = count + 1 if place and inputs[place - 1] == word else 1
            expected.append(count)
        assert targets == expected
    long = sample(LocalCount(), 5000, 4)
    assert long.targets.max() == 48
    assert long.inputs[0].max() == 15


@pytest.mark.parametrize(("probability", "share"), [(0.1, 0.1), (0.8, 0.8)])
def test_flip_flop_reads_what_was_written_last(probability, share):
    batch = sample(FlipFlop(probability), 64, 200)
    writes = 0
    for inputs, targets in zip(batch.inputs[0].tolist(), batch.targets.tolist(), strict=True):
        assert (inputs[0], inputs[-1]) == (2, 4)
        memory = None
        for name, bit in zip(inputs[:-1:2], inputs[1::2], strict=True):
            assert name in (2, 3)
            memory = bit if name == 2 else memory
            writes += name == 2
        assert targets == [IGNORED] * 62 + [memory]
    assert (writes - 200) / (200 * 30) == pytest.approx(share, abs=0.02)


def test_max_retrieval_wants_the_class_of_the_largest_priority():
    batch = sample(LargestItem(), 9, 50)
    items, query = batch.inputs
    assert items.shape == (50, 9, 11)
    assert query.shape == (50, 1)
    for members, target in zip(items.tolist(), batch.targets.tolist(), strict=True):
        assert all(0 <= item[0] < 1 and sorted(item[1:]) == [0] * 9 + [1] for item in members)
        assert max(members)[1:].index(1) == target


@pytest.mark.parametrize(("quantifier", "solve"), [("every", all), ("some", any)])
@pytest.mark.parametrize("shown", [True, False])
def test_quantifiers_are_true_of_the_numbers_so_far(quantifier, solve, shown):
    batch = sample(Quantifier(quantifier, undecided=0.5, answers_shown=shown), 7, 100)
    finals = set()
    for inputs, targets in zip(batch.inputs[0].tolist(), batch.targets.tolist(), strict=True):
        numbers = inputs[::2] if shown else inputs
        truth = [solve(number > 0 for number in numbers[:end]) for end in range(1, 8)]
        assert (targets[::2] if shown else targets) == [int(true) for true in truth]
        if shown:
            assert inputs[1::2] == [1.0 if true else -1.0 for true in truth[:-1]]
            assert set(targets[1::2]) == {IGNORED}
        finals.add(truth[-1])
    assert finals == {True, False}


def test_numbers_have_the_requested_deviation():
    assert sample(Quantifier("every", input_sigma=7), 200, 50).inputs[0][:, ::2].std() == pytest.approx(7, rel=0.05)
    slopes = sample(LinearFunction(function_sigma=5), 2, 4000).inputs[0]
    assert (slopes[:, 1] / (1 + slopes[:, 0] ** 2).sqrt()).std() == pytest.approx(5, rel=0.05)


def test_linear_functions_lie_on_one_line():
    batch = sample(LinearFunction(), 10)
    assert batch.targets[:, 1::2].isnan().all()
    for inputs, targets in zip(batch.inputs[0].double().tolist(), batch.targets[:, ::2].tolist(), strict=True):
        x, y = inputs[::2], inputs[1::2]
        slope = (y[1] - y[0]) / (x[1] - x[0])
        for point, value in zip(x, targets, strict=True):
            assert value == pytest.approx(y[0] + slope * (point - x[0]), rel=1e-2, abs=1e-2)
        assert targets[:-1] == pytest.approx(y)


@pytest.mark.parametrize(
    ("sampler", "length", "message"),
    [
        (Rearrange("copy"), 0, "length is 0"),
        (AssociativeRecall(), 20, "holds 3 pairs"),
        (AssociativeRecall(alphabet=2), 64, "only 4 different keys"),
        (TwoBack(), 1, "at least 2"),
        (LocalCount(), 0, "at least 1"),
        (FlipFlop(), 33, "even number"),
        (FlipFlop(), 2, "at least 4"),
        (LargestItem(), 0, "at least 1"),
        (Quantifier("some"), 0, "at least 1"),
        (LinearFunction(), -1, "at least 1"),
    ],
)
def test_lengths_that_cannot_work_are_refused(sampler, length, message):
    with pytest.raises(InputError, match=message):
        sample(sampler, length)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rearrange("copy", symbols=1), "symbols is 1"),
        (lambda: Rearrange("shuffle"), "order is 'shuffle'"),
        (lambda: AssociativeRecall(alphabet=1), "alphabet is 1"),
        (lambda: AssociativeRecall(density=1.5), "between 0 and 1"),
        (lambda: LocalCount(words=1), "words is 1"),
        (lambda: FlipFlop(-0.1), "between 0 and 1"),
        (lambda: LargestItem(classes=1), "classes is 1"),
        (lambda: Quantifier("most"), "quantifier is 'most'"),
        (lambda: LinearFunction(function_sigma=0.0), "above 0"),
        (lambda: get_task("juggling"), "choose one of: max-retrieval"),
        (lambda: with_parameters(Rearrange("copy"), ("letters=3",)), "parameters are: order, symbols"),
        (lambda: with_parameters(Rearrange("copy"), ("symbols=many",)), "whole number"),
        (lambda: with_parameters(Quantifier("some"), ("answers_shown=yes",)), "true or false"),
        (lambda: choose_task(TASKS["sort"], Choices("softmax", heads=7), ()), "divided among 7 heads"),
        (lambda: choose_task(TASKS["max-retrieval"], Choices("softmax", heads=2), ()), "one head"),
        (lambda: choose_task(TASKS["mqmtar"], Choices("softmax", lengths=(8, 16)), ()), "choose a longer one"),
        (lambda: choose_task(TASKS["copy"], Choices("softmax", lengths=(9, 8)), ()), "in order"),
    ],
)
def test_parameters_that_cannot_work_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_parameters_are_set_by_name():
    sampler = with_parameters(Quantifier("some"), ("input_sigma=3", "answers_shown=false"))
    assert sampler == Quantifier("some", input_sigma=3.0, answers_shown=False)


def logits_for(targets: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(targets.clamp(min=0), classes).float()


def test_scores_of_known_outputs():
    batch = sample(Rearrange("copy"), 4, 3)
    outputs = logits_for(batch.targets, 33)
    assert sample_scores("exact_match", outputs, batch).tolist() == [1, 1, 1]
    outputs[1, -1] = outputs[1, -1].roll(1)
    assert sample_scores("exact_match", outputs, batch).tolist() == [1, 0, 1]
    assert sample_scores("accuracy", outputs, batch).tolist() == pytest.approx([1, 0.8, 1])
    assert sample_scores("final_accuracy", outputs, batch).tolist() == [1, 0, 1]


def test_squared_error_begins_with_the_third_point():
    batch = sample(LinearFunction(), 5, 3)
    outputs = batch.targets.nan_to_num(9.0).unsqueeze(-1)
    outputs[:, :4] = 100.0
    assert sample_scores("squared_error", outputs, batch).tolist() == [0, 0, 0]
    outputs[0, 4] += 3
    assert sample_scores("squared_error", outputs, batch).tolist() == pytest.approx([3, 0, 0], abs=1e-4)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("norm", ["softmax", "asentmax"])
def test_every_task_has_a_model_that_learns_from_it(name, norm):
    task, model = tiny(name, norm)
    batch = sample(task.sampler, task.longest_training_length, 2)
    found = loss(model(*batch.inputs), batch.targets)
    found.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert any(gradient.abs().sum() > 0 for gradient in gradients.values())
    assert 0 <= score(model, task.sampler, task.metric, task.longest_training_length, 3).mean < 1e6


def test_the_defaults_are_those_of_the_papers():
    task = TASKS["mqmtar"]
    assert task.sampler == AssociativeRecall(alphabet=256, key_tokens=2, value_tokens=2, queries=4, density=0.8)
    assert (task.shape.layers, task.shape.q_heads, task.shape.hidden_size) == (4, 16, 512)
    settings = make_settings(task, Choices("asentmax"))
    assert (settings.steps, settings.batch_sequences, settings.warmup_steps) == (390_625, 128, 10_000)
    assert settings.stages[0].lengths == range(32, 65)
    retrieval = make_settings(TASKS["max-retrieval"], Choices("softmax"))
    assert (retrieval.steps, retrieval.weight_decay) == (100_000, 0.001)
    assert {retrieval.learning_rate_at(step) for step in (0, 50_000, 99_999)} == {0.001}
    assert retrieval.stages[0].lengths == range(5, 17)
    curriculum = make_settings(TASKS["every"], Choices("ssa"))
    lengths = [curriculum.batch_at(step, generator()) for step in (0, 1999, 2000, 38_000, 499_999)]
    assert lengths == [(64, 3), (64, 3), (64, 5), (64, 40), (64, 40)]


def test_a_short_run_keeps_the_shape_of_its_schedule():
    settings = make_settings(choose_task(TASKS["every"], Choices("ssa", steps=5000), ()), Choices("ssa"))
    assert [settings.batch_at(step, generator())[1] for step in (0, 20, 380)] == [3, 5, 40]
    assert make_settings(choose_task(TASKS["sort"], Choices("ssa", steps=3125), ()), Choices("ssa")).warmup_steps == 100


def test_lengths_can_be_taken_in_steps():
    choices = Choices("softmax", lengths=(32, 64), length_step=16)
    (stage,) = choose_task(TASKS["mqmtar"], choices, ()).training.stages
    assert list(stage.lengths) == [32, 48, 64]


def test_the_feed_forward_part_has_the_chosen_width():
    _, model = tiny("2back", "softmax", lengths=(4, 4), intermediate_size=24)
    assert model.config.intermediate_size == 24
    with pytest.raises(InputError, match="leave out --layers, --heads, --intermediate-size"):
        choose_task(TASKS["max-retrieval"], Choices("softmax", intermediate_size=24), ())


def test_a_score_does_not_depend_on_how_samples_are_batched(monkeypatch):
    task, model = tiny("sort", lengths=(4, 8))
    whole = score(model, task.sampler, "accuracy", 8, 20, seed=3)
    monkeypatch.setattr("sharp.models.tasks.scoring.WEIGHTS_PER_RUN", 1)
    parts = score(model, task.sampler, "accuracy", 8, 20, seed=3)
    assert parts.mean == pytest.approx(whole.mean, abs=1e-6)
    assert whole.mean != score(model, task.sampler, "accuracy", 8, 20, seed=4).mean


def test_a_length_that_needs_more_memory_than_there_is_is_refused():
    task, model = tiny("copy")
    with pytest.raises(InputError, match="choose shorter lengths"):
        score(model, task.sampler, task.metric, 2**22, 1)
