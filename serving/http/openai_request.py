"""The requests of OpenAI's API, checked, as prompts and `SamplingParams`."""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sharp.serving.chat_template import ChatTemplate
from sharp.serving.errors import FieldError, InputError
from sharp.serving.guided import Guided
from sharp.serving.request import Prompt
from sharp.serving.sampling_params import SamplingParams

# Where OpenAI's API has a limit of its own when the client says none.
DEFAULT_COMPLETION_TOKENS = 16
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "n", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "time_limit_ms"),
)
Body = TypeVar("Body", bound="GenerationRequest")


class _Message(BaseModel):
    # What is not known is refused: a parameter that silently does nothing is worse than an error.
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(_Message):
    """What a stream carries besides the answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GuidedFields(_Message):
    """`Guided`, as a field of a request."""

    json_: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class GenerationRequest(_Message):
    """The fields of both APIs: OpenAI's, ours, and at the end those that mean something to OpenAI's servers only."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    time_limit_ms: int | None = None
    guided: GuidedFields | None = None
    priority: int = 0
    cache_salt: str = ""

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def params(self) -> SamplingParams:
        """How to draw and when to stop."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(**given, max_tokens=self.limit, logprobs=self.wanted_logprobs, guided=self.guide())

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`."""
        raise NotImplementedError

    def guide(self) -> Guided | None:
        """What the answer must match."""
        if self.guided is None:
            return None
        return Guided(json=self.guided.json_, regex=self.guided.regex, grammar=self.guided.grammar)


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    def prompts(self) -> Sequence[Prompt]:
        """The prompts; the answers of each follow those of the one before."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError("best_of", f"best_of is {self.best_of}; only the value of n is supported")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise FieldError("prompt", "prompt is an empty list; give at least one text or token id")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`."""
        return self.logprobs


class TextPart(_Message):
    """A part of a message; other parts than text are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation; what else it has is the template's to read."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """As templates expect it: one text."""
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        return {**(self.model_extra or {}), "role": self.role, "content": text or ""}


class ResponseFormat(_Message):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None

    def prompt(self, template: ChatTemplate | None) -> str:
        """The conversation as a text with its special tokens."""
        if template is None:
            raise InputError("the model has no chat template; use /v1/completions")
        if not self.messages:
            raise FieldError("messages", "messages is an empty list; give at least one message")
        return template.render([message.for_template() for message in self.messages])

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def guide(self) -> Guided | None:
        """What the answer must match: `guided`, or OpenAI's own `response_format`."""
        form = self.response_format
        if form is None or form.type == "text":
            return super().guide()
        if self.guided is not None:
            raise FieldError("response_format", "response_format and guided are both set; set one of them")
        if form.type == "json_object":
            return Guided(json={"type": "object"})
        schema = (form.json_schema or {}).get("schema")
        if schema is None:
            raise FieldError("response_format", "response_format.json_schema has no schema")
        return Guided(json=schema)


def parse(kind: type[Body], body: bytes) -> Body:
    """The checked body of a request.

    Raises:
        FieldError: a field is missing, unknown, or of another type.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        field = str(first["loc"][0]) if first["loc"] else "body"
        what = "is not known here" if first["type"] == "extra_forbidden" else f"cannot be used: {first['msg']}"
        raise FieldError(field, f"{path or 'the body'} {what}") from error
