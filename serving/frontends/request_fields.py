"""`RequestFields`: the fields that requests for text have in OpenAI's API and in KServe's."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import Guided
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.json_fields import (
    FAIL_FAST,
    NULL_IS_UNSET,
    LogitBias,
    Number,
    RequestBody,
    StopTexts,
    StrictMessage,
    TokenIds,
    WholeNumber,
)
from sharp.serving.frontends.structured_outputs import (
    MOST_CHOICES,
    NESTED,
    JsonSchema,
    ResponseFormat,
    StructuralTag,
    StructuredOutputs,
)

# The fields that `SamplingParams` has under the same names.
OF_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "n", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "time_limit_ms"),
    *("include_stop_str_in_output", "allowed_token_ids", "bad_words", "skip_special_tokens"),
)


class GuidedFields(StrictMessage):
    """The field `guided` of a request: one of a JSON schema, a regular expression and a Lark grammar."""

    json_: JsonSchema = None
    regex: str | None = None
    grammar: str | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class RequestFields(RequestBody):
    """The fields of `SamplingParams` and `GenerateRequest`, whose ranges are checked there, and of structured output.

    A completion must match `guided` or at most one of the ten fields of vLLM's and OpenAI's from `response_format` on.
    """

    temperature: Number | None = None
    top_k: WholeNumber | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: LogitBias | None = None
    seed: WholeNumber | None = None
    n: WholeNumber | None = None
    max_tokens: WholeNumber | None = None
    min_tokens: WholeNumber | None = None
    stop: StopTexts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], FAIL_FAST] | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    time_limit_ms: WholeNumber | None = None
    priority: Annotated[WholeNumber, NULL_IS_UNSET] = 0
    cache_salt: Annotated[str, NULL_IS_UNSET] = ""
    truncate_prompt_tokens: WholeNumber | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    guided: GuidedFields | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_decoding: StructuredOutputs | None = None
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MOST_CHOICES)] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: StructuralTag = None

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            FieldError: a value is out of its range, or cannot be used in this API.
        """
        given = {name: value for name in OF_SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            max_tokens=self.limit,
            logprobs=self.requested_logprobs,
            prompt_logprobs=self.requested_prompt_logprobs,
            guided=self.guide(),
        )

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens to generate; None for no limit but the context's."""
        return self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        """The number of likeliest tokens to report per generated token, for `SamplingParams.logprobs`; None is off."""
        return None

    @property
    def requested_prompt_logprobs(self) -> int | None:
        """The number of likeliest tokens to report per prompt token (`SamplingParams.prompt_logprobs`); None is off."""
        return None

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a prompt gets the tokenizer's special tokens."""
        return True if self.add_special_tokens is None else self.add_special_tokens

    @property
    def structure_fields(self) -> list[str]:
        """The names of the fields of structured output that are set, without `guided`."""
        older = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
        names = [name for name in older if getattr(self, name) is not None]
        names += ["guided_json_object"] if self.guided_json_object else []
        for name in NESTED:
            nested = getattr(self, name)
            names += [name] if nested is not None and (nested.given or nested.json_object is None) else []
        formatted = self.response_format is not None and self.response_format.type != "text"
        return names + (["response_format"] if formatted else [])

    def guide(self) -> Guided | None:
        """Return what the completion must match, from `guided` or the fields of structured output; None if none is set.

        Raises:
            FieldError: several of these fields are set, or a value cannot be used.
        """
        names = self.structure_fields
        if self.guided is not None:
            if names:
                raise FieldError(names[0], f"{names[0]} and guided are both set; set one of them")
            return Guided(json=self.guided.json_, regex=self.guided.regex, grammar=self.guided.grammar)
        if len(names) > 1:
            raise FieldError(names[0], f"{' and '.join(names)} are both set; set one of them")
        if not names:
            return None
        if names[0] in (*NESTED, "response_format"):
            nested: StructuredOutputs | ResponseFormat = getattr(self, names[0])
            return nested.guide()
        older: dict[str, Any] = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
            "json_object": self.guided_json_object,
            "structural_tag": self.structural_tag,
            "whitespace_pattern": self.guided_whitespace_pattern,
        }
        return StructuredOutputs.model_validate(older).guide()

    def renamed(self, error: FieldError) -> FieldError:
        """Return an error about a field of `GenerateRequest` under the name that the field has in this API."""
        if self.guided is None and error.field.startswith("guided") and (names := self.structure_fields):
            return renamed_error(error, names[0])
        return error


def renamed_error(error: FieldError, field: str) -> FieldError:
    """Return an error with `field` as the name of its field."""
    # The field guided.json is guided_json here, or the field json inside structured_outputs.
    inner = error.field.partition(".")[2]
    name = f"{field}.{inner}" if field in NESTED and inner else field
    return FieldError(field, str(error).replace(error.field, name, 1))
