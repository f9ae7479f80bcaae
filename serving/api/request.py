"""`GenerateRequest`: one request, from the frontend that reads it to the engine that runs it."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sharp.serving.api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharp.serving.engine.guide import Guide

Prompt = str | Sequence[int]


class Request(Protocol):
    """What an engine is given: a `GenerateRequest`, or an `EncodeRequest` for an encoder's."""

    @property
    def request_id(self) -> str:
        """Unique among running requests."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The token ids of what it reads."""

    @property
    def prompt_tokens(self) -> int:
        """How many tokens it reads."""

    @property
    def completions(self) -> int:
        """How often the engine says that something of it is finished."""


def new_request_id() -> str:
    """A random request id."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class GenerateRequest:
    """A request for `params.n` completions of one prompt.

    Frontends, clients and `LLM` make it; `ModelFolder.prepare` checks it and fills in the last four attributes, which
    the engine reads.

    Attributes:
        prompt: text, or token ids.
        params: sampling parameters and stop conditions.
        model: name of the model; empty for the served one.
        request_id: unique among running requests; empty for a random one.
        attention: collect attention statistics of this request.
        attention_per_token: every Delta has the entropies of its tokens, too.
        priority: requests of a lower number go first and are preempted last; equal ones go by arrival.
        cache_salt: the prefix cache is shared only by requests of the same salt.
        special_tokens: add the tokenizer's special tokens to a text; false for the output of a chat template.
        truncate_prompt_tokens: keep so many tokens of a prompt that is longer; -1 is what the context has room for,
            None keeps all.
        truncate_right: keep the first of them, not the last.
        prompt_ids: the prompt's token ids.
        max_new_tokens: most tokens to generate; at most `params.max_tokens`, and what the context has room for.
        guide: `params.guided`, compiled; every sequence follows a copy.
        bad_word_ids: `params.bad_words` as tokens.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    model: str = ""
    request_id: str = ""
    attention: bool = False
    attention_per_token: bool = False
    priority: int = 0
    cache_salt: str = ""
    special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncate_right: bool = False
    prompt_ids: tuple[int, ...] = ()
    max_new_tokens: int = 0
    guide: "Guide | None" = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The token ids of what it reads."""
        return (self.prompt_ids,)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens it reads."""
        return len(self.prompt_ids)

    @property
    def completions(self) -> int:
        """How often the engine says that something of it is finished."""
        return self.params.n
