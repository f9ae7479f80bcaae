"""One request, and the checks that every prompt passes before the engine sees it."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import FieldError
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.engine.guide import Guide, GuideCompiler
from sharp.serving.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

# Of text that is longer than this many characters per allowed token, the start is tokenized first.
CHARACTERS_PER_TOKEN = 8
MOST_CHARACTERS = 2**20
MAX_CACHE_SALT = 256
# They are held until the prompt is computed, and then sent at once.
MAX_PROMPT_LOGPROBS = 2**18
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True)
class Request:
    """What the engine is asked for: a checked prompt that fits the context together with `max_new_tokens`.

    Attributes:
        request_id: unique among running requests.
        prompt_ids: the prompt.
        params: how to draw and when to stop.
        max_new_tokens: most tokens to generate; at most `params.max_tokens`.
        attention: collect attention statistics of this request.
        priority: requests of a lower number go first and are preempted last; equal ones go by arrival.
        cache_salt: the prefix cache is shared only by requests of the same salt.
        guide: `params.guided`, compiled; every answer follows a copy.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    attention: bool = False
    priority: int = 0
    cache_salt: str = ""
    guide: Guide | None = None


def prepare_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    *,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    context_limit: int,
    guides: GuideCompiler,
    attention: bool = False,
    priority: int = 0,
    cache_salt: str = "",
    special_tokens: bool = True,
) -> Request:
    """Tokenize and check a prompt. `context_limit` is the longest sequence that one request may grow to.

    Without `special_tokens` a text gets none around it: what rendered it has written them.

    Raises:
        FieldError: the prompt is empty, has a token that the model has not, is text for a model without a tokenizer,
            or leaves no room in the context; a parameter asks for what this model cannot do; or another field is out
            of its range.
    """
    _check_params(params, manifest, tokenizer)
    _check_priority(priority)
    if not isinstance(cache_salt, str) or len(cache_salt) > MAX_CACHE_SALT:
        raise FieldError("cache_salt", f"cache_salt must be a text of at most {MAX_CACHE_SALT} characters")
    if isinstance(prompt, str):
        _check_start(prompt, manifest, tokenizer, context_limit)
        prompt = tokenize(prompt, manifest, tokenizer, special_tokens=special_tokens)
    try:
        room = _room(len(prompt), params, context_limit, manifest)  # first: a message may hold millions of them
        prompt_ids = tuple(map(operator.index, prompt))  # numpy's integers too, but no 1.5 that would become 1
    except TypeError as error:
        raise FieldError("prompt", f"prompt is neither text nor a list of token ids: {error}") from error
    check_token_ids("prompt", prompt_ids, manifest)
    asked = len(prompt_ids) * (1 + (params.prompt_logprobs or 0))
    if params.prompt_logprobs is not None and asked > MAX_PROMPT_LOGPROBS:
        message = (
            f"prompt_logprobs is {params.prompt_logprobs}, which makes {asked} numbers for {len(prompt_ids)} tokens"
        )
        raise FieldError("prompt_logprobs", f"{message}; the limit is {MAX_PROMPT_LOGPROBS}")
    if params.min_tokens > room:
        raise FieldError("min_tokens", f"min_tokens is {params.min_tokens}; the prompt leaves room for {room} tokens")
    max_new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    guide = guides.compile(params.guided) if params.guided else None
    return Request(request_id, prompt_ids, params, max_new_tokens, attention, priority, cache_salt, guide)


def _room(tokens: int, params: SamplingParams, context_limit: int, manifest: Manifest) -> int:
    """How many tokens the context has left after a prompt of so many."""
    if not tokens:
        raise FieldError("prompt", "prompt has 0 tokens; it must have at least 1")
    room = context_limit - tokens
    needed = 0 if params.max_tokens == 0 else 1
    if room < needed:
        small = context_limit < manifest.max_context
        reason = f", as the server's cache has no room for the model's {manifest.max_context}" if small else ""
        context = f"a context of {context_limit}{' with room for one new token' if needed else ''}{reason}"
        raise FieldError("prompt", f"prompt has {tokens} tokens; the limit is {context_limit - needed} ({context})")
    return room


def _check_params(params: SamplingParams, manifest: Manifest, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None and params.stop:
        raise FieldError("stop", f"stop strings need text, and {manifest.name} has no tokenizer; use stop_token_ids")
    check_token_ids("stop_token_ids", params.stop_token_ids, manifest)
    check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], manifest)


def check_token_ids(name: str, token_ids: Sequence[int], manifest: Manifest) -> None:
    """Refuse token ids, in the field `name` of a request, that the model has not.

    Raises:
        FieldError: which one.
    """
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= manifest.vocab_size:
        limit = f"{manifest.name} has ids 0 to {manifest.vocab_size - 1}"
        raise FieldError(name, f"{name} has token id {low if low < 0 else high}; {limit}")


def _check_priority(priority: int) -> None:
    if not isinstance(priority, int) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        limits = f"from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise FieldError("priority", f"priority is {priority!r}; it must be a whole number {limits}")


def _check_start(text: str, manifest: Manifest, tokenizer: Tokenizer | None, limit: int) -> None:
    """Refuse a text that is far too long without spending seconds on tokenizing all of it."""
    start = text[: limit * CHARACTERS_PER_TOKEN]
    # Where text is cut, a word may become more tokens than it is: a tenth more proves that the whole is too long.
    if len(start) < len(text) and len(tokenize(start, manifest, tokenizer)) > limit * 1.1:
        message = f"prompt has {len(text)} characters, which is far more than {limit} tokens, the limit"
        raise FieldError("prompt", message)


def check_characters(text: str, context_limit: int) -> None:
    """Refuse a text to tokenize, which need not fit the context, that would take a server's memory.

    Raises:
        FieldError: it has more characters than a full context may have, and more than a million.
    """
    limit = max(MOST_CHARACTERS, context_limit * CHARACTERS_PER_TOKEN)
    if len(text) > limit:
        raise FieldError("prompt", f"prompt has {len(text)} characters; the limit is {limit}, tokenize it in parts")


def tokenize(text: str, manifest: Manifest, tokenizer: Tokenizer | None, *, special_tokens: bool = True) -> list[int]:
    """The token ids of a text prompt.

    Raises:
        InputError: the model has no tokenizer.
    """
    if tokenizer is None:
        raise FieldError("prompt", f"prompt is text, and {manifest.name} has no tokenizer; send token ids")
    return tokenizer.encode(text, special_tokens=special_tokens)
