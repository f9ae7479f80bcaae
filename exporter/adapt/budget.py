"""The plan of a run within the user's tokens and seconds: what is measured, the steps of training, and their time."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sharp.core.errors import InputError
from sharp.exporter.adapt.calibration import calibrated_lengths, candidates
from sharp.exporter.adapt.measurement import Before
from sharp.exporter.adapt.measures import MEASURED, Measures, smaller
from sharp.exporter.adapt.rates import Rates
from sharp.exporter.adapt.recipe import Recipe
from sharp.exporter.adapt.settings import AdaptSettings

LONG_SHARE = 0.5  # share of a long stage's tokens in sequences of the model's context length
# Share of the training time that longer contexts may take; with a budget, share of it that all measurements may take.
MEASURED_SHARE = 0.4
# Measuring a window of n tokens with teacher, raw swap and student takes as long as training on
# n * WINDOW_TOKENS * (1 + n / EVEN_LENGTH) tokens: measured for SmolLM2 with entmax on a CPU, where 8,192 tokens cost
# four times as many tokens of training.
WINDOW_TOKENS, EVEN_LENGTH = 0.8, 2048
# A resumed run of another version of the choice of windows would compare different windows.
WINDOWS_VERSION = 3
CALIBRATED_SHARE = 0.2  # share of the budget that a calibration may take, unless its longest sequence is the least
LEAST_CALIBRATED = 512  # tokens of that least sequence
SPARE = 0.1  # share of the budget that is left for phases that take longer than planned
LEAST_STEPS = 10  # steps of the shortest training that a budget is spent on


@dataclass(frozen=True)
class Plan:
    """The plan of a run: what is measured, how it trains, and the expected `seconds` of every phase by its name."""

    measures: Measures
    recipe: Recipe
    seconds: dict[str, float]


@dataclass(frozen=True)
class Planner:
    """The facts from which a run is planned.

    Attributes:
        settings: the user's settings.
        rates: the measured speed.
        context: the model's longest context, in tokens.
        texts: the texts to measure on, int64 [n].
        train_tokens: the length in tokens of the text to train on.
        normalizer: the normalizer of the student's norm.
        dtype: the dtype of matrix products in training.
        processes: the number of processes that train together.
        writing: the expected seconds of writing the model.
    """

    settings: AdaptSettings
    rates: Rates
    context: int
    texts: Sequence[Tensor]
    train_tokens: int
    normalizer: str
    dtype: str
    processes: int
    writing: float

    def plan(self, spent: float, before: Before | None) -> Plan:
        """Return the plan of a run, `spent` seconds after its start.

        `before` holds the figures that an interrupted run has measured, if it did. The plan has their extent.

        Raises:
            InputError: the budget is too small for the smallest measurements and ten steps of training.
        """
        choices = [before.measures] if before is not None else self._choices()
        calibrated, calibrating = self._calibrated(choices[-1])
        least = self.recipe(self._least_tokens)
        left = self._limit - spent - calibrating - self.writing
        needed = sum(self._measuring(choices[-1], before)) + self.rates.training(least)
        if needed > left:
            raise self._too_small(self._limit - left + needed, least.steps)
        share = MEASURED_SHARE if least.steps else 1.0
        fitting = (found for found in choices if sum(self._measuring(found, before)) <= share * left)
        measures = next(fitting, choices[-1])
        teacher, student = self._measuring(measures, before)
        recipe = self.recipe(self.tokens_within(left - teacher - student))
        seconds = {
            "reading": spent,
            "measuring the teacher": teacher,
            "calibrating": calibrating,
            "training": self.rates.training(recipe),
            "measuring the student": student,
            "writing": self.writing,
        }
        measures = replace(measures, calibrated=calibrated)
        return Plan(measures, recipe, {name: found for name, found in seconds.items() if found > 0})

    def _calibrated(self, measures: Measures) -> tuple[int, float]:
        """Return the longest sequence of the calibration, in tokens, and the seconds of the calibration, 0 without one.

        It is that of `measures`, halved until the calibration takes no more than its share of the budget. An
        interrupted run has the same as before, because its measures have it.
        """
        longest, seconds = measures.calibrated, 0.0
        while self.settings.calibrate != "no":
            lengths = calibrated_lengths(self.train_tokens, min(self.context, longest))
            seconds = self.rates.calibrating(lengths, len(candidates(self.normalizer)))
            if seconds <= CALIBRATED_SHARE * self._limit or longest <= LEAST_CALIBRATED:
                break
            longest //= 2
        return longest, seconds

    def tokens_after(self, plan: Plan, spent: float, before: Before) -> int:
        """Return the tokens to train on, `spent` seconds after the start, when the figures `before` are measured.

        The time of measuring the student is estimated anew from that of teacher and raw swap.
        """
        estimated = sum(self._measuring(plan.measures, None)[:1])
        slower = before.seconds / estimated if estimated > 0 else 1.0
        return self.tokens_within(
            self._limit - spent - self.writing - slower * plan.seconds.get("measuring the student", 0.0)
        )

    def tokens_within(self, seconds: float) -> int:
        """Return the most tokens that can be trained on in that time, from `LEAST_STEPS` steps to `settings.tokens`."""
        counts = range(self._least_tokens, self.settings.tokens + 1)
        return counts[
            max(0, bisect_right(counts, seconds, key=lambda count: self.rates.training(self.recipe(count))) - 1)
        ]

    def recipe(self, tokens: int) -> Recipe:
        """Return the recipe of a training on `tokens` tokens, of at least one step; none with `calibrate="only"`."""
        settings, length, batch = self.settings, self.settings.length, self.settings.batch
        if settings.calibrate == "only":
            return Recipe(0, length, batch, seed=settings.seed)
        long_length, long_batch = settings.longest_sequence(self.context), self.processes
        long_steps = max(1, round(tokens * LONG_SHARE / (long_length * long_batch))) if long_length > length else 0
        short_steps = max(1, (tokens - long_steps * long_length * long_batch) // (batch * length))
        steps, longest = short_steps + long_steps, long_length if long_steps else 0
        path = settings.calibrate == "no"  # calibrated heads fit the final norm, not the path to it
        return Recipe(steps, length, batch, long_steps, longest, long_batch, settings.seed, path, dtype=self.dtype)

    @property
    def _limit(self) -> float:
        """The seconds after which a planned run ends; infinite without a budget."""
        return math.inf if self.settings.budget is None else self.settings.budget * (1 - SPARE)

    @property
    def _least_tokens(self) -> int:
        """The fewest tokens that a training may have: `LEAST_STEPS` steps, or the settings' tokens if fewer."""
        return min(self.settings.tokens, LEAST_STEPS * self.settings.batch * self.settings.length)

    def _choices(self) -> list[Measures]:
        """Return what can be measured, the largest first; only one choice without a budget."""
        given, length = self.settings.measure_length, self.settings.length
        texts = [len(text) for text in self.texts]
        longest = measured_length(self.recipe(self.settings.tokens), self.context, texts) if given is None else given
        full = Measures(length, min(self.context, longest))
        return [full] if self.settings.budget is None else list(smaller(full, shorten=given is None))

    def _measuring(self, measures: Measures, before: Before | None) -> tuple[float, float]:
        """Return the seconds of measuring teacher and raw swap, as far as `before` lacks them, and of the student."""
        whole, short = (measures.passes(self.texts, self.context, needles=needles) for needles in (True, False))
        teacher = 0.0 if before is not None and before.teacher is not None else self.rates.teacher.of_passes(whole)
        raw = 0.0 if before is not None and before.raw is not None else self.rates.student.of_passes(short)
        return teacher + raw, self.rates.student.of_passes(whole)

    def _too_small(self, needed: float, steps: int) -> InputError:
        """Return the error for a budget below the `needed` seconds of a run with that many steps."""
        assert self.settings.budget is not None
        least = math.ceil(needed / (1 - SPARE) / 10 + 0.5) * 10  # the next run may be a little slower
        trained = f" and {steps} steps of training" if steps else ""
        return InputError(
            f"--budget is {self.settings.budget:g} seconds, and on this machine reading, measuring, writing{trained} "
            f"take about {needed:.0f}; give at least --budget {least}s"
        )


def measured_length(recipe: Recipe, context: int, texts: Sequence[int]) -> int:
    """Return the longest context, in tokens, of the perplexities by position, for texts of `texts` numbers of tokens.

    The result is the model's `context`, or less if measuring would take more than two fifths of the training time. It
    is at least four training sequences long, and at least the recipe's `long_length`, unless the context is shorter.
    Times are estimated without a clock, so a run without a budget has the same windows on every machine.
    """
    longest = max(MEASURED * recipe.length, recipe.long_length)
    while longest < context:
        longer = min(2 * longest, context)
        windows = [min(longer, text) for text in texts]
        if (
            sum(WINDOW_TOKENS * window * (1 + window / EVEN_LENGTH) for window in windows)
            > MEASURED_SHARE * recipe.tokens
        ):
            break
        longest = longer
    return min(longest, context)
