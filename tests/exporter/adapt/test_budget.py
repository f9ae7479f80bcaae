"""`--budget` is the time of the whole command: what a run measures and trains in it, by rates and not by a clock."""

import json
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sharp.core.errors import InputError
from sharp.exporter.adapt import adapt as module
from sharp.exporter.adapt import measurement
from sharp.exporter.adapt.adapt import adapt
from sharp.exporter.adapt.budget import SPARE, Planner
from sharp.exporter.adapt.cli import plan_line
from sharp.exporter.adapt.measurement import Before, measure_student
from sharp.exporter.adapt.measures import Measures
from sharp.exporter.adapt.rates import PassSeconds, Rates, fit
from sharp.exporter.adapt.settings import AdaptSettings
from sharp.exporter.adapt.student import Student, make_student
from sharp.exporter.sources.norm_options import NormOptions
from tests.exporter.adapt.test_adapt import refusals, settings

# About SmolLM2-135M on two cores: 0.4 s for 256 tokens of the teacher, 0.6 s of the student, 2 s a training step.
RATES = Rates(PassSeconds(0.0016, 4e-7), PassSeconds(0.0022, 1e-6), 2.0)
TEXTS = (torch.zeros(25_000, dtype=torch.int64), torch.zeros(2_400, dtype=torch.int64))
INSTANT = Rates(PassSeconds(0.0), PassSeconds(0.0), 1e4)
READING, WRITING = 15.0, 5.0


def planner(budget: float | None, rates: Rates = RATES, **changes: object) -> Planner:
    chosen = AdaptSettings(norm="entmax", budget=budget, **{"tokens": 10**6, **changes})
    return Planner(chosen, rates, 8192, TEXTS, 400_000, "entmax", "float32", 1, WRITING)


@pytest.mark.parametrize(
    "changes", [{}, {"calibrate": "first"}, {"calibrate": "only"}, {"stage": "long", "length": 512}, {"batch": 4}]
)
def test_all_phases_together_fit_into_the_budget_with_room_to_spare(changes: dict[str, object]) -> None:
    tokens = []
    for minutes in (8, 16, 60, 600):
        plan = planner(60.0 * minutes, **{"tokens": 10**8, **changes}).plan(READING, None)
        assert sum(plan.seconds.values()) <= (1 - SPARE) * 60 * minutes
        assert plan.seconds["reading"] == READING and plan.seconds["writing"] == WRITING
        tokens.append(plan.recipe.tokens)
    assert tokens == sorted(tokens)
    if changes.get("calibrate") != "only":
        assert tokens[0] < tokens[-1]
        assert sum(plan.seconds.values()) > 0.95 * (1 - SPARE) * 60 * minutes


def test_a_smaller_budget_measures_less() -> None:
    plans = [planner(seconds).plan(READING, None) for seconds in (90.0, 300.0, 1200.0, 7200.0)]
    longest = [plan.measures.longest for plan in plans]
    assert longest == sorted(longest) and longest[0] <= 1024 and longest[-1] == 8192
    assert plans[0].measures.trials < plans[-1].measures.trials == 4
    for plan in plans[1:]:
        measured = plan.seconds["measuring the teacher"] + plan.seconds["measuring the student"]
        assert measured < plan.seconds["training"]


def test_a_calibration_takes_a_fifth_of_the_budget_at_most() -> None:
    plans = [planner(seconds, calibrate="first").plan(READING, None) for seconds in (120.0, 600.0, 7200.0)]
    lengths = [plan.measures.calibrated for plan in plans]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == 8192
    for plan, budget in zip(plans[1:], (600.0, 7200.0), strict=True):
        assert 0 < plan.seconds["calibrating"] <= 0.2 * budget


def test_without_a_budget_the_clock_changes_nothing() -> None:
    slow = Rates(PassSeconds(1.0, 1.0), PassSeconds(1.0, 1.0), 1000.0)
    plans = [planner(None, rates, tokens=100_000).plan(READING, None) for rates in (RATES, slow)]
    assert plans[0].recipe == plans[1].recipe and plans[0].recipe.steps == 390
    assert plans[0].measures == plans[1].measures == Measures(256, 8192)


def test_the_least_budget_of_a_refusal_is_enough() -> None:
    with pytest.raises(InputError) as refused:
        planner(30.0).plan(READING, None)
    least = re.fullmatch(
        r"--budget is 30 seconds, and on this machine reading, measuring, writing and 10 steps of training take about "
        r"\d+; give at least --budget (\d+)s",
        str(refused.value),
    )
    assert least is not None
    plan = planner(float(least[1])).plan(READING, None)
    assert plan.recipe.steps >= 10
    with pytest.raises(InputError):
        planner(0.8 * float(least[1])).plan(READING, None)


def test_a_length_that_the_user_chose_is_measured_or_the_budget_refused() -> None:
    assert planner(1200.0, measure_length=4096).plan(READING, None).measures.longest == 4096
    with pytest.raises(InputError, match="give at least --budget"):
        planner(90.0, measure_length=8192).plan(READING, None)


def test_the_steps_are_chosen_anew_when_measuring_took_longer_than_planned() -> None:
    chosen = planner(1200.0)
    plan = chosen.plan(READING, None)
    planned = plan.seconds["measuring the teacher"]
    for factor in (0.8, 1.0, 1.5):
        before = Before(plan.measures, {"seconds": factor * planned / 2}, {"seconds": factor * planned / 2})
        spent = READING + factor * planned
        recipe = chosen.recipe(chosen.tokens_after(plan, spent, before))
        student = factor * plan.seconds["measuring the student"]
        left = 1200 * (1 - SPARE) - spent - student - WRITING
        assert left - 2 * 2.0 < RATES.training(recipe) <= left


def test_the_time_of_passes_of_any_length_follows_from_two() -> None:
    one = PassSeconds(0.002, 1e-6)
    found = fit(256, one.of_passes([256]), 1024, one.of_passes([1024]))
    assert found.of_passes([8192, 64]) == pytest.approx(one.of_passes([8192]) + one.of_passes([64]))
    assert fit(24, 0.6, 24, 0.6).of_passes([48]) == pytest.approx(1.2)
    assert fit(24, 0.6, 96, 0.6) == PassSeconds(0.6 / 96)  # a pass that only just began is no faster when longer


def test_the_passes_of_a_plan_are_those_that_measuring_makes(teacher, monkeypatch) -> None:
    student = make_student(teacher(), "entmax", NormOptions(), 4, None, 24, 0)
    seen: list[int] = []
    hidden = Student.hidden

    def watched(self: Student, ids: torch.Tensor, every_layer: bool = False) -> object:
        seen.append(ids.shape[1])
        return hidden(self, ids, every_layer)

    monkeypatch.setattr(Student, "hidden", watched)
    texts = {"held_out": torch.arange(3, 203), "unlike": torch.arange(3, 53)}
    for measures in (Measures(24, 100), Measures(24, 24, windows=1, trials=0), Measures(24, 128, windows=2)):
        done: list[int] = []

        def phase(_name: str, steps: int, done: list[int] = done) -> Callable[[], None]:
            done.append(-steps)
            return lambda: done.append(1)

        seen.clear()
        measure_student(student, measures, texts, phase, "Measuring", needles=False)
        *planned, first, second = measures.passes(texts.values(), 128, needles=False)
        assert first == second == 128  # of the heads' statistics, which here have a shorter text
        assert sorted(seen) == sorted([*planned, 50])
        assert sum(done) == 0


def test_a_run_trains_as_many_steps_as_its_budget_allows_and_resumes_to_them(
    teacher,
    text: Path,
    tmp_path: Path,
    monkeypatch,
) -> None:
    monkeypatch.setattr(module, "measure_rates", lambda *_: INSTANT)
    path, chosen, plans = teacher(), settings(text, tokens=24 * 200, budget=1e6), []
    assert adapt(path, chosen, tmp_path / "student", stop_after=3, on_plan=plans.append) is None
    assert plan_line(plans[0], 1e6).startswith("Plan: 2,136 tokens in 89 steps, about 148")
    monkeypatch.setattr(module, "measure_rates", lambda *_: replace(INSTANT, step=2e4))
    report = adapt(path, chosen, tmp_path / "student", on_plan=plans.append)
    assert report is not None and report["recipe"]["steps"] == 89  # 10,000 s each in 900,000 s, less reading
    assert len(plans) == 1


def test_a_budget_that_is_spent_already_is_refused(teacher, text: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sharp.exporter.adapt.budget.SPARE", 0.9999)  # of 1 second, 0.1 ms may be used
    said = refusals(teacher(), tmp_path / "student", "--text", text, "--length", 24, "--budget", "1s")
    assert re.search(r"--budget is 1 seconds, and .*; give at least --budget \d+s$", said)
    both = refusals(teacher(), tmp_path / "student", "--text", text, "--budget", "1h", "--measure-speed")
    assert "--measure-speed takes minutes that cannot be planned within --budget" in both


def test_the_figures_of_the_teacher_are_kept_as_soon_as_they_are_measured(
    teacher,
    text: Path,
    tmp_path: Path,
    monkeypatch,
) -> None:
    phases: list[str] = []

    def phase(name: str, _steps: int) -> Callable[[], None]:
        phases.append(name)
        return lambda: None

    def killed(*arguments: object, **options: object) -> object:
        if arguments[-1] == "Measuring the raw swap":
            raise KeyboardInterrupt
        return measure_student(*arguments, **options)

    path, chosen, folder = teacher(), settings(text, tokens=24 * 4, budget=1e5), tmp_path / "student"
    with monkeypatch.context() as patch:
        patch.setattr(measurement, "measure_student", killed)
        with pytest.raises(KeyboardInterrupt):
            adapt(path, chosen, folder, phase)
    kept = json.loads((tmp_path / "student.partial" / "before.json").read_text())
    phases.clear()
    report = adapt(path, chosen, folder, phase)
    assert [name for name in phases if name.startswith("Measuring the ")] == [
        "Measuring the speed",
        "Measuring the raw swap",
        "Measuring the student",
    ]
    assert report is not None and report["teacher_figures"] == kept["teacher"]


def test_what_is_written_has_the_permissions_of_other_files(teacher, text: Path, tmp_path: Path) -> None:
    folder, ordinary = tmp_path / "student", tmp_path / "ordinary"
    adapt(teacher(), settings(text, tokens=24, keep_adapter=True), folder)
    ordinary.mkdir()
    (ordinary / "file").touch()
    for path in (folder, *folder.rglob("*")):
        like = ordinary if path.is_dir() else ordinary / "file"
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(like.stat().st_mode), path
