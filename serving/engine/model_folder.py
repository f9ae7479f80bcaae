"""`ModelFolder`: a loaded decoder as requests see it, and the checks of requests before the engine gets them."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sharp.core.manifest import Manifest
from sharp.serving.api.errors import ContextLengthError, FieldError
from sharp.serving.api.request import GenerateRequest, new_request_id
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.engine.served_model import Abilities
from sharp.serving.text.tokenizer import CHARACTERS_PER_TOKEN, TOKEN_BYTES, Tokenizer, check_token_ids, tokenize

MAX_CACHE_SALT = 256
# The logprobs of a prompt stay in memory until the whole prompt is computed, and are then sent at once.
MAX_PROMPT_LOGPROBS = 2**18
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True)
class ModelFolder:
    """A loaded decoder as requests see it, and the size of its cache. Thread-safe.

    `longest` is the longest sequence that the backend computes. `sampling` holds the defaults of sampling parameters
    that a request leaves out.
    """

    manifest: Manifest
    tokenizer: Tokenizer | None
    blocks: int
    guides: GuideCompiler
    longest: int
    sampling: Mapping[str, float]

    @property
    def cache_tokens(self) -> int:
        """The number of tokens that the cache holds."""
        return self.blocks * self.manifest.cache.block_size

    @property
    def context_limit(self) -> int:
        """The length, in tokens, of the longest sequence that one request may grow to."""
        return min(self.longest, self.cache_tokens)

    @property
    def request_limit(self) -> int:
        """The maximum number of tokens of one request."""
        return self.context_limit

    @property
    def token_bytes(self) -> int:
        """The maximum number of bytes per token in a request's message."""
        return TOKEN_BYTES

    @property
    def abilities(self) -> Abilities:
        """The ability to complete prompts."""
        return Abilities(generator=self)

    def probe(self) -> GenerateRequest:
        """Return a request of one token that belongs to no client, for health checks."""
        params = SamplingParams(temperature=0, max_tokens=1)
        return GenerateRequest((0,), params, request_id=new_request_id(), prompt_ids=(0,), max_new_tokens=1)

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """Return the checked request, ready for the engine. This may take long, so do not call it in the event loop.

        Raises:
            FieldError: a field cannot be used; the message names the field, its value and the limit.
            QueueFullError: too many grammars wait to be compiled.
            EngineError, UnavailableError: the process that compiles grammars does not start, or was ended.
        """
        return prepare_request(
            replace(request, params=request.params.with_defaults(self.sampling)),
            manifest=self.manifest,
            tokenizer=self.tokenizer,
            context_limit=self.context_limit,
            guides=self.guides,
        )


def prepare_request(
    request: GenerateRequest,
    *,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    context_limit: int,
    guides: GuideCompiler,
) -> GenerateRequest:
    """Return the checked request, ready for the engine. Sequences may grow to `context_limit` tokens.

    `prompt` becomes the token ids, and a missing `request_id` a random one. `prompt_ids`, `max_new_tokens`, `guide` and
    `bad_word_ids` are filled in.

    Raises:
        FieldError: the prompt is empty, has a token id outside the vocabulary, is text for a model without a tokenizer,
            or does not fit the context (`ContextLengthError`); the model does not support a parameter; or a field is
            out of range.
        QueueFullError: too many grammars wait to be compiled.
        EngineError, UnavailableError: the process that compiles grammars does not start, or was ended.
    """
    prompt, params = request.prompt, request.params
    _check_params(params, manifest, tokenizer)
    _check_priority(request.priority)
    if not isinstance(request.cache_salt, str) or len(request.cache_salt) > MAX_CACHE_SALT:
        raise FieldError("cache_salt", f"cache_salt must be a text of at most {MAX_CACHE_SALT} characters")
    if isinstance(prompt, str):
        _check_start(prompt, manifest, tokenizer, context_limit)
        prompt = tokenize(prompt, manifest, tokenizer, special_tokens=request.special_tokens)
    if request.truncate_prompt_tokens is not None:
        prompt = _truncated(prompt, request, params.max_tokens, context_limit)
    try:
        # The length is checked before the ids, because a message may hold millions of ids.
        room = _room(len(prompt), params, context_limit, manifest)
        prompt_ids = tuple(map(operator.index, prompt))  # accepts numpy integers, but does not round 1.5 to 1
    except TypeError as error:
        raise FieldError("prompt", f"prompt is neither text nor a list of token ids: {error}") from error
    check_token_ids("prompt", prompt_ids, manifest)
    numbers = len(prompt_ids) * (1 + (params.prompt_logprobs or 0))
    if params.prompt_logprobs is not None and numbers > MAX_PROMPT_LOGPROBS:
        message = (
            f"prompt_logprobs is {params.prompt_logprobs}, which makes {numbers} numbers for {len(prompt_ids)} tokens"
        )
        raise FieldError("prompt_logprobs", f"{message}; the limit is {MAX_PROMPT_LOGPROBS}")
    if params.min_tokens > room:
        raise FieldError("min_tokens", f"min_tokens is {params.min_tokens}; the prompt leaves room for {room} tokens")
    return replace(
        request,
        prompt=prompt_ids,
        request_id=request.request_id or new_request_id(),
        prompt_ids=prompt_ids,
        max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        guide=guides.compile(params.guided) if params.guided else None,
        bad_word_ids=_bad_word_ids(params.bad_words, manifest, tokenizer),
    )


def _room(tokens: int, params: SamplingParams, context_limit: int, manifest: Manifest) -> int:
    """Return the number of tokens that the context has left after a prompt of `tokens` tokens.

    Raises:
        FieldError: the prompt has no tokens.
        ContextLengthError: the prompt leaves no room for a token that the request needs.
    """
    if not tokens:
        raise FieldError("prompt", "prompt has 0 tokens; it must have at least 1")
    room = context_limit - tokens
    needed = 0 if params.max_tokens == 0 else 1
    if room < needed:
        small = context_limit < manifest.max_context
        reason = f", as the server's cache has no room for the model's {manifest.max_context}" if small else ""
        context = f"a context of {context_limit}{' with room for one new token' if needed else ''}{reason}"
        message = f"prompt has {tokens} tokens; the limit is {context_limit - needed} ({context})"
        raise ContextLengthError("prompt", message, context_limit, tokens, needed)
    return room


def _truncated(prompt: Sequence[int], request: GenerateRequest, max_tokens: int | None, limit: int) -> Sequence[int]:
    """Return the prompt, shortened as `truncate_prompt_tokens` and `truncate_right` of the request say.

    `limit` is the context length; -1 leaves room in it for `max_tokens`, or for one token.

    Raises:
        FieldError: `truncate_prompt_tokens` is neither -1 nor a positive number.
    """
    kept = request.truncate_prompt_tokens
    room = limit - (1 if max_tokens is None else min(max_tokens, limit - 1))
    if not isinstance(kept, int) or kept < -1 or kept == 0:
        message = f"truncate_prompt_tokens is {kept!r}; it must be -1 or a whole number of at least 1"
        raise FieldError("truncate_prompt_tokens", message)
    if kept == -1:
        kept = room
    return prompt[:kept] if request.truncate_right else prompt[max(0, len(prompt) - kept) :]


def _bad_word_ids(words: Sequence[str], manifest: Manifest, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the start of a text and, with a leading blank, inside a text."""
    found: list[tuple[int, ...]] = []
    for word in words:
        at_start, inside = (
            tuple(tokenize(start + word.lstrip(), manifest, tokenizer, special_tokens=False)) for start in ("", " ")
        )
        found.append(at_start)
        # If the blank is a token of its own, the tokens inside a text are the blank and then `at_start`, which is
        # forbidden already.
        if inside[:1] != at_start[:1] and len(inside) == len(at_start):
            found.append(inside)
    return tuple(ids for ids in found if ids)


def _check_params(params: SamplingParams, manifest: Manifest, tokenizer: Tokenizer | None) -> None:
    """Check that token ids exist, and that a model without a tokenizer gets no texts; else raise FieldError."""
    if tokenizer is None and params.stop:
        raise FieldError("stop", f"stop strings need text, and {manifest.name} has no tokenizer; use stop_token_ids")
    if tokenizer is None and params.bad_words:
        message = f"bad_words need text, and {manifest.name} has no tokenizer; use logit_bias"
        raise FieldError("bad_words", message)
    check_token_ids("stop_token_ids", params.stop_token_ids, manifest)
    check_token_ids("allowed_token_ids", params.allowed_token_ids, manifest)
    check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], manifest)


def _check_priority(priority: int) -> None:
    """Check that the priority is a whole number within the limits, else raise FieldError."""
    if not isinstance(priority, int) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        limits = f"from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise FieldError("priority", f"priority is {priority!r}; it must be a whole number {limits}")


def _check_start(text: str, manifest: Manifest, tokenizer: Tokenizer | None, limit: int) -> None:
    """Refuse a text of far more than `limit` tokens, without spending seconds on tokenizing all of it.

    Raises:
        ContextLengthError: the text is too long.
    """
    start = text[: limit * CHARACTERS_PER_TOKEN]
    # Cutting the text may split a word into more tokens than it has, so only a surplus of a tenth proves that the whole
    # text is too long.
    if len(start) < len(text) and len(tokenize(start, manifest, tokenizer)) > limit * 1.1:
        message = f"prompt has {len(text)} characters, which is far more than {limit} tokens, the limit"
        raise ContextLengthError("prompt", message, limit, None, 1)
