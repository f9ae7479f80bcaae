"""The responses of servers that `ServerReader` reads, field by field as their documentation describes them.

- OpenAI's completions: https://platform.openai.com/docs/api-reference/completions/object
- vLLM's additions (`prompt_token_ids`, `token_ids`): https://docs.vllm.ai/en/latest/serving/openai_compatible_server
- llama-server: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
- Text Generation Inference: https://huggingface.github.io/text-generation-inference (docs/openapi.json)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError, model_validator

from sharp.serving.api.errors import InputError
from sharp.serving.compare.reading import Distribution, Token

TOKEN_ID = "token_id:"  # noqa: S105 - vLLM's prefix of an id in place of a text
REPLACEMENT = "\ufffd"  # appears in the text of a token that is a part of a character


def _number(value: float) -> float:
    """Return a log-probability. ValueError if it is NaN or clearly above 0."""
    if math.isnan(value) or value > 1e-3:
        raise ValueError("a log-probability must be at most 0")
    return value


Logprob = Annotated[float, AfterValidator(_number)]


class TokenEntry(BaseModel):
    """A token with its log-probability, as llama-server or Text Generation Inference writes it."""

    id: int | None = None
    token: str = ""
    logprob: Logprob | None = None

    @property
    def name(self) -> Token:
        """The id of the token, or its text if there is no id."""
        return self.token if self.id is None else self.id


class TokenWithTop(TokenEntry):
    """A generated token of llama-server, with the most likely tokens at its position."""

    top_logprobs: list[TokenEntry] = []

    @property
    def distribution(self) -> Distribution:
        """The log-probabilities of the token and of the most likely tokens."""
        return joined((entry.name, entry.logprob) for entry in (*self.top_logprobs, self))


class Logprobs(BaseModel):
    """OpenAI's `logprobs` of a completion; llama-server has that of a chat, `content`, in their place."""

    tokens: list[str] = []
    token_logprobs: list[Logprob | None] = []
    top_logprobs: list[Mapping[str, Logprob] | None] | None = None
    content: list[TokenWithTop] = []

    @model_validator(mode="after")
    def _same_length(self) -> "Logprobs":
        """Check that tokens, log-probabilities and their alternatives are equally many, else raise ValueError."""
        lengths = {len(self.tokens), len(self.token_logprobs), len(self.top_logprobs or self.tokens)}
        if len(lengths) > 1:
            raise ValueError("there must be as many tokens as log-probabilities")
        return self

    @property
    def names(self) -> list[Token]:
        """The tokens, as ids if the server gives ids."""
        return [name_of(token) for token in self.tokens] or [token.name for token in self.content]

    @property
    def distributions(self) -> list[Distribution | None]:
        """One distribution (log-probability by token) per token; None for the first token of a text, which has none."""
        if self.content:
            return [token.distribution for token in self.content]
        tops = self.top_logprobs or [None] * len(self.tokens)
        return [
            None if logprob is None else joined([*map(_named, (top or {}).items()), (name_of(token), logprob)])
            for token, logprob, top in zip(self.tokens, self.token_logprobs, tops, strict=True)
        ]


class Choice(BaseModel):
    """A completion in the response of OpenAI's `/v1/completions`, an entry of `choices`."""

    text: str = ""
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class UsageCounts(BaseModel):
    """The field `usage` of OpenAI's response: the number of tokens of the prompt."""

    prompt_tokens: int


class Completions(BaseModel):
    """The response of OpenAI's `/v1/completions`: one completion or more."""

    choices: Annotated[list[Choice], Field(min_length=1)]
    usage: UsageCounts | None = None


class Models(BaseModel):
    """The response of OpenAI's `/v1/models`, which lists the served models."""

    class Model(BaseModel):
        """An entry of `/v1/models`; `id` is the name to send in requests."""

        id: str

    data: list[Model]


class TokenList(BaseModel):
    """The response of `/tokenize` of vLLM and llama-server, and of `/extras/tokenize` of llama-cpp-python's server."""

    tokens: list[int]


class LlamaCompletion(BaseModel):
    """The response of llama-server's `/completion`."""

    completion_probabilities: list[TokenWithTop] = []
    tokens: list[int] = []


class Details(BaseModel):
    """The field `details` of Text Generation Inference: tokens of the prompt (`prefill`) and generated tokens."""

    prefill: list[TokenEntry]
    tokens: list[TokenEntry]
    top_tokens: list[list[TokenEntry]] = []


class TextGeneration(BaseModel):
    """The response of `/generate` of Text Generation Inference."""

    details: Details


Response = TypeVar("Response")
TextTokens = list[TokenEntry]  # the response of `/tokenize` of Text Generation Inference


def parsed(kind: type[Response], response: object, source: str) -> Response:
    """Return a response as an object of type `kind`.

    Raises:
        InputError: the response has another form; the message names `source` and the field.
    """
    try:
        return TypeAdapter(kind).validate_python(response)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the response"
        raise InputError(
            f"{source} sends what no known server sends ({field}: {first['msg']}); is a model's server there?"
        ) from error


def name_of(text: str) -> Token:
    """Return the id in a text like token_id:97, or the text."""
    number = text.removeprefix(TOKEN_ID)
    return int(number) if number != text and number.isdigit() else text


def joined(pairs: Iterable[tuple[Token, float | None]]) -> Distribution:
    """Return the distribution of pairs, without texts that several tokens share, such as parts of characters."""
    return {
        token: logprob
        for token, logprob in pairs
        if logprob is not None and not (isinstance(token, str) and ambiguous(token))
    }


def by_text(tokens: Sequence[Token]) -> bool:
    """Whether any token is given by its text and not by its id."""
    return any(isinstance(token, str) for token in tokens)


def ambiguous(text: str) -> bool:
    """Whether several tokens may have this text, because each is a part of a character."""
    return not text or REPLACEMENT in text or text.startswith("bytes:")


def _named(pair: tuple[str, float]) -> tuple[Token, float]:
    """Return a (token, log-probability) pair with the token's name read as an id where it is one."""
    return name_of(pair[0]), pair[1]
