"""`ModelFolder`: what requests need to know of a loaded model, and what checks them before the engine sees them."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import ContextLengthError, FieldError
from sharp.serving.api.request import GenerateRequest, Request, new_request_id
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.text.tokenizer import CHARACTERS_PER_TOKEN, Tokenizer, check_token_ids, tokenize

MAX_CACHE_SALT = 256
# They are held until the prompt is computed, and then sent at once.
MAX_PROMPT_LOGPROBS = 2**18
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True)
class ModelFolder:
    """What requests need to know of a model, and the size of its cache. Safe to share between threads.

    `longest` is the longest sequence that the backend computes, `sampling` what requests get that do not say it.
    """

    manifest: Manifest
    tokenizer: Tokenizer | None
    blocks: int
    guides: GuideCompiler
    longest: int
    sampling: Mapping[str, float]

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.blocks * self.manifest.cache.block_size

    @property
    def context_limit(self) -> int:
        """The longest sequence that one request may grow to."""
        return min(self.longest, self.cache_tokens)

    @property
    def request_limit(self) -> int:
        """The most tokens of one request."""
        return self.context_limit

    @property
    def token_bytes(self) -> int:
        """The most bytes of a request for one of its tokens."""
        return 48  # 8 characters, each of which may be written \uXXXX

    def probe(self) -> Request:
        """A request that is nobody's, of one token."""
        params = SamplingParams(temperature=0, max_tokens=1)
        return GenerateRequest((0,), params, request_id=new_request_id(), prompt_ids=(0,), max_new_tokens=1)

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """The checked request, ready for the engine. Long texts and large grammars take a while: use another thread.

        Raises:
            FieldError: a field cannot be used; the message names it, its value and the limit.
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
    """The request with `prompt_ids`, `max_new_tokens` and `guide`. Sequences may grow to `context_limit` tokens.

    Raises:
        FieldError: the prompt is empty, has a token id outside the vocabulary, is text for a model without a tokenizer,
            or does not fit the context; the model does not support a parameter; or a field is out of range.
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
        room = _room(len(prompt), params, context_limit, manifest)  # first: a message may hold millions of them
        prompt_ids = tuple(map(operator.index, prompt))  # numpy's integers too, but no 1.5 that would become 1
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
    """How many tokens the context has left after a prompt of so many."""
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
    """As much of a prompt as the request says."""
    kept = request.truncate_prompt_tokens
    room = limit - (1 if max_tokens is None else min(max_tokens, limit - 1))
    if not isinstance(kept, int) or kept < -1 or kept == 0:
        message = f"truncate_prompt_tokens is {kept!r}; it must be -1 or a whole number of at least 1"
        raise FieldError("truncate_prompt_tokens", message)
    if kept == -1:
        kept = room
    return prompt[:kept] if request.truncate_right else prompt[max(0, len(prompt) - kept) :]


def _bad_word_ids(words: Sequence[str], manifest: Manifest, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of each text at the start of a text and inside one, where a blank is a part of the first token."""
    found: list[tuple[int, ...]] = []
    for word in words:
        at_start, inside = (
            tuple(tokenize(start + word.lstrip(), manifest, tokenizer, special_tokens=False)) for start in ("", " ")
        )
        found.append(at_start)
        # A blank that is a token of its own is not forbidden: the word after it is, by the first of the two.
        if inside[:1] != at_start[:1] and len(inside) == len(at_start):
            found.append(inside)
    return tuple(ids for ids in found if ids)


def _check_params(params: SamplingParams, manifest: Manifest, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None and params.stop:
        raise FieldError("stop", f"stop strings need text, and {manifest.name} has no tokenizer; use stop_token_ids")
    if tokenizer is None and params.bad_words:
        message = f"bad_words need text, and {manifest.name} has no tokenizer; use logit_bias"
        raise FieldError("bad_words", message)
    check_token_ids("stop_token_ids", params.stop_token_ids, manifest)
    check_token_ids("allowed_token_ids", params.allowed_token_ids, manifest)
    check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], manifest)


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
        raise ContextLengthError("prompt", message, limit, None, 1)
