"""The requests of OpenAI's API, checked, as prompts and `SamplingParams`."""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sharp.serving.chat_template import ChatTemplate
from sharp.serving.errors import FieldError, InputError
from sharp.serving.guided import Guided
from sharp.serving.request import Prompt
from sharp.serving.sampling_fields import SamplingFields, StrictMessage, first_error

# Where OpenAI's API has a limit of its own when the client says none.
DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 256  # in one request
Body = TypeVar("Body", bound="GenerationRequest")


class StreamOptions(StrictMessage):
    """What a stream carries besides the answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(SamplingFields):
    """The fields of both APIs: OpenAI's, ours, and at the end those that mean something to OpenAI's servers only."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    attention_stats: bool = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


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
        if len(self.prompt) > MAX_PROMPTS:
            raise FieldError("prompt", f"prompt has {len(self.prompt)} prompts; the limit is {MAX_PROMPTS}")
        return self.prompt

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`."""
        return self.logprobs


class TextPart(StrictMessage):
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


class ResponseFormat(StrictMessage):
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
        raise first_error(error) from error
