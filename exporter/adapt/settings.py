"""The settings of an adaptation."""

from dataclasses import dataclass
from pathlib import Path

from sharp.core.errors import InputError
from sharp.exporter.adapt.recipe import DTYPES
from sharp.exporter.sources.norm_options import NO_OPTIONS, NormOptions

MAX_ERROR = 0.2  # largest relative error of a calibrated head's output; bench/notes/adapt.md has what it costs
CALIBRATES = ("auto", "no", "first", "only")


@dataclass(frozen=True)
class AdaptSettings:
    """The user's settings; the fields are the options of `sharp adapt`.

    Attributes:
        norm: the name of the new attention norm, one of `sharp.exporter.adapt.student.NORMS`.
        norm_options: the options of `norm`; what is None has its default.
        ignore_keys: unknown keys of the checkpoint to accept.
        text: files and folders to train on; none: the documentation of Python.
        held_out: a file of another text to measure on; None: Sharp's licence.
        length: the number of tokens of a training sequence.
        tokens: the most tokens to train on; at least one step is done.
        budget: the seconds that the whole command may take, with reading, measuring and writing; None: no limit.
        batch: the number of sequences of a step, over all processes.
        rank: the rank of the adapters of the projections.
        layers: the first and the last layer whose projections are adapted, both 0-based and included; None: all.
        stage: "short", or "long": half of the tokens are in sequences of the model's own context length.
        seed: seeds the adapters and the choice of sequences.
        device: "auto", "cpu" or "cuda".
        dtype: of matrix products in training; "auto" is bfloat16 on an x86 processor or a GPU with instructions
            for it.
        keep_adapter: write the adapters, too, in peft's format.
        measure_length: the longest context of the perplexities by position; None: the model's context, or less if
            measuring would take more than two fifths of the training time, but at least four times `length`. A budget
            may make it shorter.
        measure_speed: export teacher and student, and measure how fast both decode.
        calibrate: "first": every head starts with the parameters that change its output least (`calibration.py`);
            "only": the same without training; "no": heads start with the norm's start values; "auto": "first" for
            entmax and its family, otherwise "no".
        max_error: the largest relative error of calibrated heads; all heads of a KV head with more keep softmax.

    Raises:
        InputError: a number or a choice is out of range. Norm and device are checked by `adapt`.
    """

    norm: str
    norm_options: NormOptions = NO_OPTIONS
    ignore_keys: tuple[str, ...] = ()
    text: tuple[Path | str, ...] = ()
    held_out: Path | str | None = None
    length: int = 256
    tokens: int = 100_000
    budget: float | None = None
    batch: int = 1
    rank: int = 16
    layers: tuple[int, int] | None = None
    stage: str = "short"
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    keep_adapter: bool = False
    measure_length: int | None = None
    measure_speed: bool = False
    calibrate: str = "auto"
    max_error: float = MAX_ERROR

    def __post_init__(self) -> None:
        if isinstance(self.text, str | Path):
            raise InputError(f"text is {self.text!r}, but must be a tuple of files and folders")
        for name, least, most in (
            ("length", 8, 2**20),
            ("tokens", 1, 10**12),
            ("batch", 1, 4096),
            ("rank", 1, 1024),
            ("seed", 0, 2**31),
        ):
            if not least <= getattr(self, name) <= most:
                raise InputError(f"--{name} is {getattr(self, name)}, but must be from {least} to {most}")
        if self.measure_length is not None and self.measure_length < self.length:
            raise InputError(f"--measure-length is {self.measure_length}, but must be at least --length, {self.length}")
        if self.budget is not None and not 1 <= self.budget <= 10**7:
            raise InputError(f"--budget is {self.budget:g} seconds, but must be from 1 second to 100 days")
        if self.budget is not None and self.measure_speed:
            raise InputError(
                "--measure-speed takes minutes that cannot be planned within --budget; leave out one of the two"
            )
        if self.stage not in ("short", "long"):
            raise InputError(f"--stage is {self.stage!r}, but must be short or long")
        if self.calibrate not in CALIBRATES:
            raise InputError(f"calibrate is {self.calibrate!r}, but must be one of: {', '.join(CALIBRATES)}")
        if not 0 <= self.max_error <= 1e6:
            raise InputError(f"--max-error is {self.max_error:g}, but must be from 0 to 1e6")
        if self.dtype not in ("auto", *DTYPES):
            raise InputError(f"--dtype is {self.dtype!r}, but must be auto, {' or '.join(DTYPES)}")

    def longest_sequence(self, context: int) -> int:
        """Return the number of tokens of the longest training sequences, for a model whose context is `context`."""
        return context if self.stage == "long" else self.length
