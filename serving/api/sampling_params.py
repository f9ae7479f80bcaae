"""`SamplingParams`: the settings that control how tokens are sampled and when generation ends."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import Guided

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 65536
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256


class NotGiven:
    """A mark of a default number that a model's own may replace. `dataclasses.replace` keeps the mark."""


class _Float(NotGiven, float):
    pass


class _Int(NotGiven, int):
    pass


@dataclass(frozen=True)
class SamplingParams:
    """The settings that control how tokens are sampled and when generation ends. Values are checked at creation.

    The logits of a token pass, in this order: guided mask and `min_tokens`, `logit_bias`, the three penalties,
    `temperature`, then `top_k`, `top_p` and `min_p`, which keep some of the tokens to sample from.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by the temperature.
        top_k: sample from the k most likely tokens only; 0 and -1 mean all tokens, and -1 is stored as 0.
        top_p: sample from the most likely tokens whose probabilities just reach `top_p`.
        min_p: sample from tokens at least `min_p` times as likely as the most likely token.
        repetition_penalty: positive logits of tokens in prompt or completion are divided by this, others multiplied; 1
            is off.
        presence_penalty: subtracted from the logits of tokens that are in the completion.
        frequency_penalty: subtracted from a token's logit once for each time the token is in the completion.
        logit_bias: added to the logits of these tokens; may be given as a mapping, and is stored as pairs of token id
            and bias.
        seed: the same seed gives the same tokens regardless of other requests; None means a random seed.
        n: number of completions of this prompt, each sampled independently.
        max_tokens: maximum number of tokens to generate; 0 only reads the prompt; None, or more than fits, generates
            until the context is full.
        min_tokens: no end-of-sequence token, stop token or stop string ends the text before this many tokens.
        stop: generation ends before the first of these strings.
        include_stop_str_in_output: the text includes the stop string, or the text of the stop token, that ended
            generation.
        stop_token_ids: generation ends at any of these tokens.
        ignore_eos: generation continues past the end-of-sequence token.
        time_limit_ms: generation ends this many milliseconds after the request's arrival and returns the text so far;
            None means no limit.
        logprobs: the number of most likely tokens whose logprobs (natural logarithms of probabilities) are returned
            besides those of the generated tokens, from the model's logits before any of the changes above; None is off,
            0 means the generated tokens only.
        prompt_logprobs: like `logprobs`, for the tokens of the prompt.
        guided: the completion must match this schema, expression or grammar.
        allowed_token_ids: only these tokens may be generated; empty means all.
        bad_words: texts that the completion must not contain, as the tokenizer writes them with and without a leading
            blank.
        skip_special_tokens: the text omits special tokens.

    Every field may be None, which selects its default. If temperature, top_k, top_p, min_p or repetition_penalty is not
    given, the model's own value is used, if its checkpoint has one (in `generation_config.json`).

    The limits are: `temperature` at least 0; `top_p` above 0 and at most 1; `min_p` from 0 to 1; `repetition_penalty`
    above 0; the other penalties from -2 to 2; biases from -100 to 100; `n` from 1 to 128; `min_tokens` at most
    `max_tokens`; `time_limit_ms` at least 1; `logprobs` and `prompt_logprobs` from 0 to 20; at most 64 stop strings,
    1,024 biases, 65,536 allowed tokens, and 64 bad words of 256 characters.

    Raises:
        FieldError: a value is out of its range; the message names the field, the value and the limit.
    """

    temperature: float = _Float(1.0)
    top_k: int = _Int(0)
    top_p: float = _Float(1.0)
    min_p: float = _Float(0.0)
    repetition_penalty: float = _Float(1.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    time_limit_ms: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided: Guided | None = None
    include_stop_str_in_output: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is None:  # not set
                object.__setattr__(self, field.name, field.default)
        # Users may pass lists, mappings and, for `stop`, a single string. They become tuples, so that the object is
        # immutable and safe to pass between threads.
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        self._make_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
            self._make_tuple(name, getattr(self, name))
        self._make_tuple("logit_bias", bias, _pair)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise FieldError(name, f"{name} is {getattr(self, name)!r}; it must be true or false")
        if not isinstance(self.guided, Guided | None):
            raise FieldError("guided", f"guided is {self.guided!r}; it must be a Guided")
        _check("temperature", self.temperature, 0, math.inf, whole=False)
        _check("top_k", self.top_k, -1, INT32_MAX)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        _check("top_p", self.top_p, 0, 1, whole=False, without_low=True)
        _check("min_p", self.min_p, 0, 1, whole=False)
        _check("repetition_penalty", self.repetition_penalty, 0, math.inf, whole=False, without_low=True)
        _check("presence_penalty", self.presence_penalty, -2, 2, whole=False)
        _check("frequency_penalty", self.frequency_penalty, -2, 2, whole=False)
        _check("seed", self.seed, 0, UINT64_MAX)
        _check("n", self.n, 1, MAX_SAMPLES)
        _check("max_tokens", self.max_tokens, 0, INT32_MAX)
        _check("min_tokens", self.min_tokens, 0, INT32_MAX if self.max_tokens is None else self.max_tokens)
        _check("time_limit_ms", self.time_limit_ms, 1, INT32_MAX)
        _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        for token, value in self.logit_bias:
            _check("logit_bias", token, 0, INT32_MAX)
            _check("logit_bias", value, -100, 100, whole=False)
        _check_count("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name):
                _check(name, token, 0, INT32_MAX)
        _check_count("stop", self.stop, MAX_STOP_STRINGS)
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise FieldError("stop", f"stop has {string!r}; each stop string must have at least one character")
        _check_count("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARACTERS:
                limit = f"each must be a text of at most {MAX_BAD_WORD_CHARACTERS} characters, and no blanks alone"
                raise FieldError("bad_words", f"bad_words has {word!r:.80}; {limit}")

    def _make_tuple(self, name: str, values: Iterable[Any], entry: Callable[[Any], Any] = lambda value: value) -> None:
        """Set the field `name` to a tuple of `values`, each passed through `entry`. FieldError if that fails."""
        try:
            object.__setattr__(self, name, tuple(map(entry, values)))
        except (TypeError, ValueError) as error:
            raise FieldError(name, f"{name} is {values!r}, which cannot be used: {error}") from error

    def with_defaults(self, defaults: Mapping[str, float]) -> "SamplingParams":
        """Return a copy in which a model's `defaults`, by field name, replace the fields that were not given.

        Raises:
            FieldError: a default is out of its range.
        """
        missing: dict[str, Any] = {
            name: value for name, value in defaults.items() if isinstance(getattr(self, name), NotGiven)
        }
        return replace(self, **missing) if missing else self

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty on repeating tokens is set."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def limits_tokens(self) -> bool:
        """Whether top-k, top-p or min-p excludes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _check(
    name: str, value: float | None, low: float, high: float, *, whole: bool = True, without_low: bool = False
) -> None:
    """Raise FieldError unless `value` is None (not set) or a finite number from `low` to `high`.

    `whole` requires a whole number; `name` is the field in the message.
    """
    if value is None:
        return
    if not isinstance(value, int if whole else (int, float)) or isinstance(value, bool):
        raise FieldError(name, f"{name} is {value!r}; it must be a {'whole ' if whole else ''}number")
    # the comparison is false for NaN
    if low <= value <= high and math.isfinite(value) and not (without_low and value == low):
        return
    if not value > high and (high == math.inf or high == INT32_MAX):
        limit = f"{'more than' if without_low else 'at least'} {low}"
    elif high == math.inf:
        limit = "that is finite"
    else:
        limit = f"more than {low} and at most {high}" if without_low else f"from {low} to {high}"
    raise FieldError(name, f"{name} is {value}; it must be a number {limit}")


def _pair(entry: Any) -> tuple[Any, Any]:
    """Return the two elements of an entry as a tuple. ValueError or TypeError for anything else."""
    first, second = entry
    return first, second


def _check_count(name: str, values: tuple[object, ...], limit: int) -> None:
    """Check that a field has at most `limit` entries, else raise FieldError for the field `name`."""
    if len(values) > limit:
        raise FieldError(name, f"{name} has {len(values)} entries; the limit is {limit}")
