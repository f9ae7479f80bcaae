"""`Sequence`: the tokens of one completion and how far it has come."""

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from sharp.serving.api.attention import AttentionRows, AttentionTotals, add_up
from sharp.serving.api.events import Finished, FinishReason, PromptChunk, Timing, TokenLogprobs, Usage
from sharp.serving.api.request import GenerateRequest
from sharp.serving.engine.block_manager import BlockHashes
from sharp.serving.engine.report import Completed
from sharp.serving.engine.speculation import PromptLookup
from sharp.serving.engine.token_counts import TokenCounts
from sharp.serving.text.stop_condition import StopCondition

# Logits of a whole prompt would fill the memory: with `prompt_logprobs` it is computed in chunks of at most this, and
# all such chunks of a step together have no more tokens than these.
PROMPT_LOGPROBS_CHUNK, PROMPT_LOGPROBS_TOKENS = 64, 256
NO_LIMIT = 2**31
Ending = tuple[FinishReason, str | int | None]  # why a sequence finished, and the stop string or token that was found


@dataclass
class Times:
    """Moments of a sequence, in seconds of `time.perf_counter`; None has not come yet."""

    arrived: float = field(default_factory=lambda: time.perf_counter())  # looked up now: tests replace it
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def since_arrival(self, now: float) -> Timing:
        """The same as durations."""
        return Timing(
            None if self.started is None else self.started - self.arrived,
            None if self.first_token is None else self.first_token - self.arrived,
            now - self.arrived,
        )


@dataclass
class PromptProgress:
    """What was computed of a sequence's prompt.

    Attributes:
        cached_tokens: tokens that the prefix cache had; None before the first step.
        chunks: the steps that computed the others.
        logprobs: one entry per token after the first, if requested.
        computed: all of it is in the cache.
    """

    cached_tokens: int | None = None
    chunks: list[PromptChunk] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: bool = False


class SamplingState:
    """What sampling the next token depends on besides the logits: random numbers, token counts, and the guide.

    Attributes:
        counts: the sequence's tokens, if it has penalties.
        guide: the sequence's position in its grammar, if it has one.
        allowed: int64 [tokens], the only ones that may be generated, if not all may.
    """

    def __init__(self, request: GenerateRequest, index: int) -> None:
        params = request.params
        # A generator per sequence: its numbers depend on seed and index and on nothing else in the batch.
        self._random = np.random.Generator(
            np.random.Philox(np.random.SeedSequence(params.seed, spawn_key=(index,) if index else ()))
        )
        self._uniforms: deque[float] = deque()  # of the next tokens
        self.counts = TokenCounts(request.prompt_ids) if params.has_penalties else None
        self.guide = request.guide.copy() if request.guide else None
        self.allowed = np.array(params.allowed_token_ids, np.int64) if params.allowed_token_ids else None

    def uniform(self, ahead: int) -> float:
        """The random number in [0, 1) of the token that follows `ahead` draft tokens."""
        while len(self._uniforms) <= ahead:
            self._uniforms.append(self._random.random())
        return self._uniforms[ahead]

    def append(self, token_id: int) -> None:
        """Go on to the next token."""
        if self._uniforms:
            self._uniforms.popleft()
        if self.counts:
            self.counts.add(token_id)


class Sequence:
    """Prompt and generated tokens; `computed` of them are in the cache.

    Steps that are planned or run and not committed yet compute `launched` tokens more, and add `expected` tokens (0 or
    1), which nobody knows before they are sampled. What the scheduler asks counts them.

    A request of `n` completions has `n` sequences. The first computes the prompt; the others start from what the prefix
    cache then has of it, so they compute its last few tokens again: a block that is not full has one writer.
    """

    def __init__(
        self, request: GenerateRequest, number: int, index: int, hashes: BlockHashes, stop: StopCondition
    ) -> None:
        self.request = request
        self.number = number  # in the order of arrival
        self.index = index
        self.order = (request.priority, number)
        self.token_ids = list(request.prompt_ids)
        self.computed = 0
        self.launched = 0
        self.expected = 0
        self.ended = False  # finished or failed; what a step still computes of it is thrown away
        self._most_tokens = len(self.token_ids) + request.max_new_tokens
        # A preempted sequence computes its tokens again; the statistics of those before this one have been counted.
        self.observed = len(request.prompt_ids) if index else 0
        self.prompt = PromptProgress()
        self.sampling = SamplingState(request, index)
        self.stop = stop
        self.times = Times()
        self.attention: AttentionTotals | None = None
        self._hashes = hashes
        self._registered = 0  # blocks that the prefix cache knows
        self._lookup: PromptLookup | None = None

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def length(self) -> int:
        """Tokens that are to be computed, the expected one too. The last one that there may be never is."""
        length = len(self.token_ids) + self.expected
        return length - 1 if self.expected and length == self._most_tokens else length

    @property
    def scheduled(self) -> int:
        """Tokens that are in the cache, or will be."""
        return self.computed + self.launched

    @property
    def remaining(self) -> int:
        """Tokens that no step computes yet: 1 while decoding, more in the prompt or after a preemption."""
        return self.length - self.computed - self.launched

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def deadline(self) -> float | None:
        """When the time limit is over, in seconds of `time.perf_counter`."""
        limit = self.request.params.time_limit_ms
        return None if limit is None else self.times.arrived + limit / 1000

    @property
    def missing_prompt_logprobs(self) -> int:
        """Number of requested prompt logprobs that no step computes yet; nothing predicts the first token."""
        requested = self.request.params.prompt_logprobs is not None and self.index == 0
        return len(self.request.prompt_ids) - 1 - self.scheduled_prompt_logprobs if requested else 0

    @property
    def scheduled_prompt_logprobs(self) -> int:
        """Number of prompt logprobs that are there, or will be, if they are requested."""
        return max(len(self.prompt.logprobs), min(self.scheduled, len(self.request.prompt_ids) - 1))

    @property
    def largest_chunk(self) -> int:
        """Most tokens that this sequence may compute in one step."""
        return PROMPT_LOGPROBS_CHUNK if self.missing_prompt_logprobs else NO_LIMIT

    @property
    def cacheable(self) -> list[bytes]:
        """The hashes of the blocks that need not be computed if the prefix cache has them.

        The last token is always computed, for its logits, and so are those whose logprobs are requested.
        """
        tokens = len(self.prompt.logprobs) if self.missing_prompt_logprobs else len(self.token_ids) - 1
        return self._hashes.up_to(self.token_ids, tokens)

    def draft(self, most: int) -> list[int]:
        """At most `most` draft tokens that may follow; the guide, if any, allows all of them."""
        most = min(most, self.request.max_new_tokens - self.generated - 1)
        if most < 1 or not self.generated:
            return []
        if self._lookup is None:
            self._lookup = PromptLookup(self.token_ids)
        draft, guide = self._lookup.draft(most), self.sampling.guide
        return draft[: guide.accepts(draft)] if guide else draft

    def start(self, shared_blocks: int, block_size: int) -> None:
        """Begin to run with blocks of the prefix cache."""
        self.computed = shared_blocks * block_size
        self._registered = shared_blocks
        if self.prompt.cached_tokens is None:
            self.prompt.cached_tokens = self.computed

    def advance(self, tokens: int) -> tuple[int, list[bytes]]:
        """Count tokens as computed; return the blocks that became full: the first one, and the hashes of all."""
        self.computed += tokens
        self.observed = max(self.observed, self.computed)
        first, hashes = self._registered, self._hashes.up_to(self.token_ids, self.computed)
        self._registered = len(hashes)
        return first, hashes[first:]

    def append(self, token_id: int) -> tuple[str, Ending | None]:
        """Add a generated token; return the text that became certain, and why the sequence finished if it did."""
        self.token_ids.append(token_id)
        self.sampling.append(token_id)
        if self._lookup:
            self._lookup.append(token_id)
        may_stop = self.generated > self.request.params.min_tokens
        text, matched = self.stop.push(token_id, may_stop=may_stop)
        if matched is not None:
            return text, (FinishReason.STOP, matched)
        guide = self.sampling.guide
        complete = guide.accept(token_id) if guide else False
        if not complete and self.generated < self.request.max_new_tokens:
            return text, None
        rest, matched = self.stop.flush()
        stopped = complete or matched is not None
        return text + rest, (FinishReason.STOP if stopped else FinishReason.LENGTH, matched)

    def observe(self, rows: AttentionRows) -> None:
        """Add the attention statistics of tokens of this sequence to its summary."""
        totals = add_up(rows)
        self.attention = totals if self.attention is None else self.attention + totals

    def completed(self) -> Completed:
        """What the metrics say of it at its end."""
        times, prefill, decode = self.times, None, None
        if times.started is not None and times.first_token is not None and times.last_token is not None:
            prefill, decode = times.first_token - times.started, times.last_token - times.first_token
        return Completed(len(self.request.prompt_ids), self.generated, prefill, decode, self.request_id)

    def finished(self, reason: FinishReason, matched: str | int | None, now: float, *, last: bool) -> Finished:
        """The event that ends this sequence."""
        return Finished(
            self.request_id,
            reason,
            matched,
            Usage(len(self.request.prompt_ids), self.generated, self.prompt.cached_tokens or 0),
            self.times.since_arrival(now),
            self.attention.summary() if self.attention else None,
            self.index,
            last,
        )
