"""`GenerateRequest`: a request for completions, as frontends create it and the engine runs it."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sharp.serving.api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharp.serving.engine.guide import Guide

Prompt = str | Sequence[int]


class Request(Protocol):
    """The interface of every request to an engine, such as `GenerateRequest` or `EncodeRequest`."""

    @property
    def request_id(self) -> str:
        """The id, unique among running requests."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The token ids of each prompt."""

    @property
    def prompt_tokens(self) -> int:
        """The total number of prompt tokens."""

    @property
    def completions(self) -> int:
        """The number of Finished events that the engine sends for the request."""


def new_request_id() -> str:
    """Return a random request id."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class GenerateRequest:
    """A request for `params.n` completions of one prompt.

    Frontends, clients and `LLM` create it. `ModelFolder.prepare` checks it and fills in the last four attributes, which
    the engine reads.

    Attributes:
        prompt: text, or token ids.
        params: sampling parameters and stop conditions.
        model: name of the model; empty means the served model.
        request_id: unique among running requests; empty means a random id.
        attention: collect attention statistics of this request.
        attention_per_token: every Delta also has the entropies of its tokens.
        priority: among the requests of a client, those with a lower number, from -10 to 10, run first and are preempted
            last. Each unit is worth 60 s of waiting; among equals the order of arrival decides.
        cache_salt: only requests with the same salt share the prefix cache.
        client: the name of the client, whose share of the server the request uses; frontends set it.
        isolation: a second salt, which frontends set.
        special_tokens: add the tokenizer's special tokens to a text prompt; false for the output of a chat template.
        truncate_prompt_tokens: cut a longer prompt to this many tokens; -1 means to what the context has room for, None
            means not to cut.
        truncate_right: cut off the last tokens instead of the first.
        prompt_ids: the prompt's token ids.
        max_new_tokens: maximum number of tokens to generate: at most `params.max_tokens` and what the context has room
            for.
        guide: `params.guided`, compiled; every sequence follows its own copy.
        bad_word_ids: `params.bad_words` as token ids.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    model: str = ""
    request_id: str = ""
    attention: bool = False
    attention_per_token: bool = False
    priority: int = 0
    cache_salt: str = ""
    client: str = ""
    isolation: str = ""
    special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncate_right: bool = False
    prompt_ids: tuple[int, ...] = ()
    max_new_tokens: int = 0
    guide: "Guide | None" = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The token ids of the prompt, as a tuple of one prompt."""
        return (self.prompt_ids,)

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        return len(self.prompt_ids)

    @property
    def completions(self) -> int:
        """The number of Finished events that the engine sends for the request."""
        return self.params.n
