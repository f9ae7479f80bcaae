"""`SamplingParams`: how tokens are drawn and when an answer ends."""

import math
from dataclasses import dataclass

from sharp.serving.errors import InputError

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when an answer ends; checked when made.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: draw among the k most likely tokens only; 0 is all.
        top_p: draw among the most likely tokens whose probabilities just reach `top_p`.
        seed: the same seed gives the same draws whatever else runs; None is a random one.
        max_tokens: most tokens to generate; 0 only reads the prompt; None, or more than fits, is until the context is
            full.
        stop: the answer ends before the first of these strings.
        stop_token_ids: the answer ends at one of these tokens.
        ignore_eos: go on past the end-of-sequence token.

    Raises:
        InputError: a value is out of its range; the message names the field, the value and the limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Lists, and one string for `stop`, are what people write; the type that crosses threads holds tuples.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for problem in (
            _out_of_range("temperature", self.temperature, 0, math.inf, whole=False),
            _out_of_range("top_k", self.top_k, 0, INT32_MAX),
            _out_of_range("top_p", self.top_p, 0, 1, whole=False),
            _out_of_range("seed", self.seed, 0, UINT64_MAX),
            _out_of_range("max_tokens", self.max_tokens, 0, INT32_MAX),
            *(_out_of_range("stop_token_ids", token, 0, INT32_MAX) for token in self.stop_token_ids),
        ):
            if problem:
                raise InputError(problem)
        if self.temperature == math.inf:
            raise InputError("temperature is inf; it must be a finite number")
        if self.top_p == 0:
            raise InputError("top_p is 0; it must be more than 0 and at most 1")
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise InputError(f"stop has {string!r}; each stop string must have at least one character")


def _out_of_range(name: str, value: float | None, low: float, high: float, *, whole: bool = True) -> str:
    """A sentence that says what is wrong with `value`, or an empty string; None means not set."""
    if value is None:
        return ""
    kind = int if whole else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool):
        return f"{name} is {value!r}; it must be a {'whole ' if whole else ''}number"
    if low <= value <= high:  # false for NaN
        return ""
    limit = f"at least {low}" if high in (math.inf, INT32_MAX) and not value > high else f"from {low} to {high}"
    return f"{name} is {value}; it must be a number {limit}"
