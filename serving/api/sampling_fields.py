"""`SamplingFields`: the parameters of a request that comes as JSON, or as names with values."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, PydanticUseDefault

from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import Guided
from sharp.serving.api.sampling_params import SamplingParams

MOST_ERRORS = 1000
MOST_PATH = 200  # characters of a field's name in a message
LONGEST_NAME, NEAR = 64, 0.85  # of a field that may be misspelt, and how near it is to another
SAME = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "n", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "time_limit_ms"),
    *("include_stop_str_in_output", "allowed_token_ids", "bad_words", "skip_special_tokens"),
)


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):  # Python's are integers
        raise PydanticCustomError("bool_as_number", "Input should be a number, not true or false")
    return value


def _not_null(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


def one_of(accepted: str) -> WrapValidator:
    """Of a field of several types: says what is `accepted`, where pydantic says what each of them is not."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("one_of", "Input should be {accepted}", {"accepted": accepted}) from error

    return WrapValidator(validate)


WholeNumber = Annotated[int, BeforeValidator(_not_bool)]
Number = Annotated[float, BeforeValidator(_not_bool)]
FAIL_FAST = Field(fail_fast=True)  # of long lists: an error for each of their entries would take seconds
NULL_IS_UNSET = BeforeValidator(_not_null)  # of a field whose default is a value
Flag = Annotated[bool, NULL_IS_UNSET]


class StrictMessage(BaseModel):
    """What is not known or of another type is refused: what silently does something else is worse than an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GuidedFields(StrictMessage):
    """The fields of `Guided`."""

    json_: Annotated[dict[str, Any] | str | bool | None, one_of("a JSON schema, or the text of one")] = None
    regex: str | None = None
    grammar: str | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class SamplingFields(StrictMessage):
    """The fields of `SamplingParams` and `GenerateRequest` under their own names; their ranges are checked there.

    Numbers may be written as strings, as Triton's clients do.
    """

    model_config = ConfigDict(strict=False)

    temperature: Number | None = None
    top_k: WholeNumber | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None
    seed: WholeNumber | None = None
    n: WholeNumber | None = None
    max_tokens: WholeNumber | None = None
    min_tokens: WholeNumber | None = None
    stop: Annotated[str | Annotated[list[str], FAIL_FAST] | None, one_of("a text or a list of texts")] = None
    stop_token_ids: Annotated[list[WholeNumber], FAIL_FAST] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Annotated[list[WholeNumber], FAIL_FAST] | None = None
    bad_words: Annotated[list[str], FAIL_FAST] | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    time_limit_ms: WholeNumber | None = None
    guided: GuidedFields | None = None
    priority: Annotated[WholeNumber, NULL_IS_UNSET] = 0
    cache_salt: Annotated[str, NULL_IS_UNSET] = ""

    def params(self) -> SamplingParams:
        """The sampling parameters.

        Raises:
            FieldError: a value is out of its range.
        """
        given = {name: value for name in SAME if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            max_tokens=self.limit,
            logprobs=self.requested_logprobs,
            prompt_logprobs=self.requested_prompt_logprobs,
            guided=self.guide(),
        )

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`."""
        return None

    @property
    def requested_prompt_logprobs(self) -> int | None:
        """`SamplingParams.prompt_logprobs`."""
        return None

    def guide(self) -> Guided | None:
        """What the completion must match."""
        if self.guided is None:
            return None
        return Guided(json=self.guided.json_, regex=self.guided.regex, grammar=self.guided.grammar)


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """The one of the `known` names that somebody who wrote `name` most likely meant; None if none is near."""
    if len(name) > LONGEST_NAME:
        return None
    near = get_close_matches(name.lower(), known, n=1, cutoff=NEAR)
    return near[0] if near else None


def _in_a_line(path: str) -> str:
    """The path of a field, which clients may name as they like, as a part of a sentence."""
    shown = path if len(path) <= MOST_PATH else f"{path[:MOST_PATH]}..."
    return "".join(character if character.isprintable() else "\ufffd" for character in shown)


def first_error(error: ValidationError, known: Iterable[str] = (), *, unknown: bool = True) -> FieldError:
    """The first thing that pydantic found, in a sentence; `known` are the fields there are.

    It is none of a field that is not known, unless `unknown` errors count.
    """
    if error.error_count() > MOST_ERRORS:  # to tell them takes seconds, in which nothing else runs
        return FieldError("body", f"the body has {error.error_count()} fields or entries that cannot be used")
    errors = error.errors(include_url=False, include_input=False)
    first = next((one for one in errors if unknown or one["type"] != "extra_forbidden"), errors[0])
    path = _in_a_line(".".join(str(part) for part in first["loc"]))
    field = str(first["loc"][0]) if first["loc"] else "body"
    what = "is not known here" if first["type"] == "extra_forbidden" else f"cannot be used: {first['msg']}"
    near = misspelt(field, known) if first["type"] == "extra_forbidden" and path == field else None
    return FieldError(field, f"{path or 'the body'} {what}" + (f"; did you mean {near}?" if near else ""))
