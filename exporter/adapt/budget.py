"""The steps of a training and the length of its measured windows, within the user's tokens and seconds."""

from collections.abc import Sequence
from statistics import fmean

from sharp.exporter.adapt.processes import Processes
from sharp.exporter.adapt.recipe import Recipe, fastest_dtype
from sharp.exporter.adapt.settings import AdaptSettings
from sharp.exporter.adapt.student import Student
from sharp.exporter.adapt.text import TrainingText
from sharp.exporter.adapt.training import seconds_per_token

LONG_SHARE = 0.5  # share of a long stage's tokens in sequences of the model's context length
MEASURED = 4  # least context of the perplexities by position, in lengths of training sequences
MEASURED_SHARE = 0.4  # share of the training time that longer contexts may take
# Measuring a window of n tokens with teacher, raw swap and student takes as long as training on
# n * WINDOW_TOKENS * (1 + n / EVEN_LENGTH) tokens: measured for SmolLM2 with entmax on a CPU, where 8,192 tokens cost
# four times as many tokens of training.
WINDOW_TOKENS, EVEN_LENGTH = 0.8, 2048
# A resumed run of another version of the choice of windows would compare different windows.
WINDOWS_VERSION = 2


def choose_recipe(settings: AdaptSettings, student: Student, text: TrainingText, processes: Processes) -> Recipe:
    """Return the recipe of the training, with as many steps as `tokens` allows, or fewer if `budget` would be exceeded.

    With a budget, a few steps are timed first. With `calibrate="only"` the recipe has 0 steps.
    """
    batch, length, tokens = settings.batch, settings.length, settings.tokens
    if settings.calibrate == "only":
        return Recipe(0, length, batch, seed=settings.seed)
    long_length, long_batch = settings.longest_sequence(student.decoder.config.max_context), processes.count
    fast = processes.of_first(fastest_dtype(next(student.model.parameters()).device) == "bfloat16")
    dtype = ("bfloat16" if fast else "float32") if settings.dtype == "auto" else settings.dtype
    if settings.budget is not None:
        own = (batch // processes.count, length)
        shapes = [own, (1, long_length)] if long_length > length else [own]
        seconds = fmean(seconds_per_token(student, text.train, *shape, dtype) for shape in shapes)
        tokens = min(tokens, int(processes.of_first(settings.budget / seconds * processes.count)))
    long_steps = max(1, round(tokens * LONG_SHARE / (long_length * long_batch))) if long_length > length else 0
    short_steps = max(1, (tokens - long_steps * long_length * long_batch) // (batch * length))
    steps, longest = short_steps + long_steps, long_length if long_steps else 0
    path = settings.calibrate == "no"  # calibrated heads fit the final norm, not the path to it
    return Recipe(steps, length, batch, long_steps, longest, long_batch, settings.seed, path, dtype=dtype)


def measured_length(recipe: Recipe, context: int, texts: Sequence[int]) -> int:
    """Return the longest context, in tokens, of the perplexities by position, for texts of `texts` numbers of tokens.

    The result is the model's `context`, or less if measuring would take more than two fifths of the training time. It
    is at least four training sequences long, and at least the recipe's `long_length`, unless the context is shorter.
    Times are estimated without a clock, so a resumed run has the same windows.
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
