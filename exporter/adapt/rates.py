"""The measured speed of a run, from which the time of its phases is estimated."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sharp.exporter.adapt.calibration import calibrated_passes
from sharp.exporter.adapt.figures import token_losses, windows_of
from sharp.exporter.adapt.measures import MEASURED
from sharp.exporter.adapt.recipe import Recipe
from sharp.exporter.adapt.student import Student
from sharp.exporter.adapt.training import CHECKPOINTED_LENGTH, seconds_per_token

RECOMPUTED = 4 / 3  # factor of the time of a training step that computes activations twice
EVALUATIONS, EVALUATION_WINDOWS = 10, 4  # evaluations on the held-out text during training, and windows of each
SPEED_STEPS = 3  # steps of progress of `measure_rates`


def evaluated_every(steps: int) -> int:
    """Return after how many training steps the student is evaluated: about ten times in a run, but every 10 steps."""
    return max(10, steps // EVALUATIONS)


@dataclass(frozen=True)
class PassSeconds:
    """The time of a forward pass of n tokens: n `linear` + n² `quadratic` seconds."""

    linear: float
    quadratic: float = 0.0

    def of_passes(self, lengths: Iterable[int]) -> float:
        """Return the seconds of passes of these lengths in tokens."""
        return sum(self.linear * length + self.quadratic * length**2 for length in lengths)


@dataclass(frozen=True)
class Rates:
    """The speed of a run: forward passes of `teacher` and `student`, and the seconds of a training `step`."""

    teacher: PassSeconds
    student: PassSeconds
    step: float

    def training(self, recipe: Recipe) -> float:
        """Return the seconds of a training with its evaluations.

        Steps with sequences of the model's context are estimated from forward passes of that length.
        """
        if not recipe.steps:
            return 0.0
        seconds = (recipe.steps - recipe.long_steps) * self.step
        if recipe.long_steps:
            passes = [
                self.teacher.of_passes([n]) + self.student.of_passes([n]) for n in (recipe.length, recipe.long_length)
            ]
            recomputed = RECOMPUTED if recipe.length < CHECKPOINTED_LENGTH <= recipe.long_length else 1.0
            long_step = self.step / recipe.batch * passes[1] / passes[0] * recomputed
            seconds += recipe.long_steps * recipe.long_batch * long_step
        evaluations = recipe.steps // evaluated_every(recipe.steps) + 1
        return seconds + evaluations * self.student.of_passes([recipe.length] * EVALUATION_WINDOWS)

    def calibrating(self, lengths: Sequence[int], candidates: int) -> float:
        """Return the seconds of comparing that many candidates for every head over sequences of these lengths."""
        passes = zip(lengths, calibrated_passes(lengths, candidates), strict=True)
        return self.teacher.of_passes(lengths) + sum(
            share * self.student.of_passes([length]) for length, share in passes
        )


def measure_rates(
    student: Student, tokens: Tensor, batch: int, length: int, dtype: str | None, advance: Callable[[], None]
) -> Rates:
    """Time a few training steps, and forward passes of teacher and student over one and four lengths of a sequence.

    No parameter is changed. The forward passes are in float32, as the measurements are.

    Args:
        student: the student before its training.
        tokens: a text int64 [n] of at least `length` tokens.
        batch: the sequences of a training step, in this process.
        length: the tokens of a sequence.
        dtype: of matrix products in training, a key of `DTYPES`; None: no training step is timed, and `step` is 0.
        advance: called `SPEED_STEPS` times.
    """
    step = 0.0 if dtype is None else batch * length * seconds_per_token(student, tokens, batch, length, dtype)
    advance()
    longer = min(MEASURED * length, student.decoder.config.max_context, len(tokens))

    def seconds_of(count: int) -> float:
        """Return the seconds of a forward pass over a window of `count` tokens."""
        began = time.monotonic()
        token_losses(student, windows_of(tokens, count, 1))
        return time.monotonic() - began

    with student.teacher():
        teacher = fit(length, seconds_of(length), longer, seconds_of(longer))
    advance()
    untrained = fit(length, seconds_of(length), longer, seconds_of(longer))
    advance()
    return Rates(teacher, untrained, step)


def fit(length: int, seconds: float, longer: int, longer_seconds: float) -> PassSeconds:
    """Return the time of passes of any length from that of `length` and of `longer` tokens, which may be equal."""
    growth = longer_seconds / longer - seconds / length
    quadratic = max(0.0, growth / (longer - length)) if longer > length else 0.0
    return PassSeconds(max(0.0, longer_seconds / longer - quadratic * longer), quadratic)
