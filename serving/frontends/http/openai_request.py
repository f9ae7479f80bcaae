"""The requests of OpenAI's API, checked, as prompts and `SamplingParams`."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from sharp.serving.api.errors import FieldError
from sharp.serving.api.request import Prompt
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.foreign_fields import OF_COMPLETIONS
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.openai_response import (
    CompletionResponse,
    Extras,
    ResponseBuilder,
)
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.json_fields import FAIL_FAST, NULL_IS_UNSET, Flag, RequestBody, StrictMessage, one_of
from sharp.serving.frontends.request_fields import RequestFields, renamed_error
from sharp.serving.text.chat_forms import ChatForms
from sharp.serving.text.tokenizer import Tokenizer

# The limit that OpenAI's API sets for `/v1/completions` if the client sets none.
DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 256  # in one request
MAX_REQUEST_ID = 256  # characters
# The tokens of fill-in-the-middle models: before the prompt, before the suffix, and before the text between them.
FILL_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)


class StreamOptions(StrictMessage):
    """The options of a stream (`stream_options`): whether its chunks also have the usage."""

    include_usage: bool | None = None
    include_obfuscation: Flag = False
    continuous_usage_stats: Flag = False


class GenerationRequest(RequestBody):
    """The fields about the form of the response, which `/v1/completions` and `/v1/chat/completions` share.

    The fields about sampling are those of `RequestFields`.
    """

    # The forms in which the model writes tool calls and reasoning. The server sets them when a body has been read.
    _forms: ChatForms = PrivateAttr(default_factory=ChatForms)

    model: Annotated[str, NULL_IS_UNSET] = ""
    stream: Flag = False
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = False
    attention_stats: Annotated[Literal[True, False, "tokens"], NULL_IS_UNSET] = False
    request_id: Annotated[str, NULL_IS_UNSET, Field(max_length=MAX_REQUEST_ID)] = ""
    return_tokens_as_token_ids: Flag = False

    def check_stream(self) -> None:
        """Check the options of streams.

        Raises:
            FieldError: an option is set, and the response is no stream.
        """
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options is set; it needs stream to be true")
        if self.attention_stats == "tokens" and not self.stream:
            raise FieldError("attention_stats", "attention_stats is 'tokens'; it needs stream to be true")

    @property
    def forms(self) -> ChatForms:
        """The forms in which the model writes tool calls and reasoning."""
        return self._forms

    def written_in(self, forms: ChatForms) -> None:
        """Set the forms in which the model writes tool calls and reasoning."""
        self._forms = forms

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the marks in a completion are special tokens, which must be seen."""
        return False

    @property
    def prompts_repeated_by(self) -> str:
        """The field that makes every completion begin with its prompt; empty if none does."""
        return ""

    def _texts(self, endpoint: Endpoint) -> TokenTexts:
        """Return the texts of tokens, or their names "token_id:N" if the request wants ids."""
        return endpoint.texts.named_by_ids() if self.return_tokens_as_token_ids else endpoint.texts

    def _extras(self, endpoint: Endpoint, computed: Sequence[Sequence[int]]) -> Extras:
        """Return the optional parts of the response; `computed` are the token ids of each prompt."""
        return Extras(
            token_ids=self.return_token_ids or endpoint.tokenizer is None,  # without a tokenizer the text is empty
            prompts=computed if self.return_token_ids else (),
            usage=self.stream and self.counts_stream,
        )

    @property
    def counts_stream(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        options = self.stream_options
        if options is None:
            return False
        return options.continuous_usage_stats if options.include_usage is None else options.include_usage

    @property
    def counts_chunks(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.counts_stream and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(GenerationRequest, RequestFields):
    """The body of `/v1/completions`."""

    foreign = OF_COMPLETIONS

    prompt: Annotated[
        str
        | Annotated[list[int], FAIL_FAST]
        | Annotated[list[str], FAIL_FAST]
        | Annotated[list[Annotated[list[int], FAIL_FAST]], FAIL_FAST],
        one_of("a text, a list of token ids, or a list of texts or of such lists"),
    ]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            FieldError: a field is out of range, or for streams only.
        """
        self.check_stream()
        return super().params()

    def prompts(self, endpoint: Endpoint) -> Sequence[Prompt]:
        """Return the prompts of the field `prompt`, or the one prompt that a `suffix` makes.

        The choices of each prompt follow those of the prompt before.

        Raises:
            FieldError: there is no prompt, there are too many, or the model cannot honour a field.
        """
        tokenizer = endpoint.tokenizer
        best_of = (self.model_extra or {}).get("best_of")
        if isinstance(best_of, int) and best_of < (self.n or 1):
            raise FieldError("best_of", f"best_of is {best_of}; it must be at least n, which is {self.n or 1}")
        if self.echo and tokenizer is None:
            raise FieldError(
                "echo", "echo is true, and the model has no tokenizer to write the prompt with; leave echo out"
            )
        if self.suffix:
            return [self._to_fill(self.suffix, tokenizer)]
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise FieldError("prompt", "prompt is an empty list; give at least one text or token id")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > MAX_PROMPTS:
            raise FieldError("prompt", f"prompt has {len(self.prompt)} prompts; the limit is {MAX_PROMPTS}")
        return self.prompt

    def response(
        self, endpoint: Endpoint, request_id: str, prompts: Sequence[Prompt], computed: Sequence[Sequence[int]]
    ) -> ResponseBuilder:
        """Return the builder of the response to these prompts, whose token ids are `computed`."""
        echo = []
        if self.echo and (tokenizer := endpoint.tokenizer) is not None:
            for prompt, prompt_ids in zip(prompts, computed, strict=True):
                echo.append((prompt if isinstance(prompt, str) else tokenizer.decode(prompt), prompt_ids[0]))
        extras = self._extras(endpoint, computed)
        return CompletionResponse(request_id, endpoint.name, self._texts(endpoint), extras, echo)

    @property
    def prompts_repeated_by(self) -> str:
        """The field that repeats the prompt in every completion: `echo`, `return_token_ids`, or none (empty)."""
        return "echo" if self.echo else "return_token_ids" if self.return_token_ids else ""

    def renamed(self, error: FieldError) -> FieldError:
        """Return an error about a field of `GenerateRequest` under the name of the field in this API."""
        return renamed_error(error, "logprobs") if error.field == "prompt_logprobs" else super().renamed(error)

    def _to_fill(self, suffix: str, tokenizer: Tokenizer | None) -> str:
        """Return the prompt whose completion stands between `prompt` and `suffix`.

        Raises:
            FieldError: the model has no tokens to fill in the middle, or other fields do not fit.
        """
        marks = next((marks for marks in FILL_MARKS if tokenizer and tokenizer.has(marks)), None)
        if marks is None:
            raise FieldError("suffix", "suffix is set, and the model has no tokens to fill in the middle; leave it out")
        if not isinstance(self.prompt, str) or self.echo:
            raise FieldError("suffix", "suffix needs one text as prompt, and echo to be false")
        before, after, between = marks
        return f"{before}{self.prompt}{after}{suffix}{between}"

    @property
    def limit(self) -> int | None:
        """The largest number of tokens to generate; None if the request sets no limit."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        """The number of likeliest tokens to report per generated token, for `SamplingParams.logprobs`; None is off."""
        return self.logprobs

    @property
    def requested_prompt_logprobs(self) -> int | None:
        """The number of likeliest tokens to report per prompt token (`SamplingParams.prompt_logprobs`); None is off."""
        return self.logprobs if self.echo else None
