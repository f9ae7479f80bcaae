"""`Sequence`: the tokens and the progress of one completion."""

import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sharp.serving.api.attention import AttentionRows, AttentionTotals, add_up
from sharp.serving.api.events import Finished, FinishReason, PromptChunk, Timing, TokenLogprobs, Usage
from sharp.serving.api.request import GenerateRequest
from sharp.serving.engine.block_manager import BlockHashes
from sharp.serving.engine.report import Completed
from sharp.serving.engine.speculation import PromptLookup
from sharp.serving.text.stop_condition import StopCondition

# The logits of a whole prompt would not fit in memory. A prompt with `prompt_logprobs` is therefore computed in chunks
# of at most PROMPT_LOGPROBS_CHUNK tokens, and all such chunks of a step have at most PROMPT_LOGPROBS_TOKENS together.
PROMPT_LOGPROBS_CHUNK, PROMPT_LOGPROBS_TOKENS = 64, 256
NO_LIMIT = 2**31
# A request of priority 1 runs after requests of priority 0 of the same client that arrive within this time after it.
PRIORITY_SECONDS = 60.0
MOST_PRIORITY = 10  # priorities beyond -MOST_PRIORITY and MOST_PRIORITY count as these
# the reason why a sequence finished, and the stop string or token that was matched
Ending = tuple[FinishReason, str | int | None]


class TokenCounts:
    """The distinct tokens of a sequence, and how often each was generated.

    `token_ids` int64 [distinct] and `counts` float32 [distinct] grow only by new tokens, so a step needs no pass over
    the sequence or the vocabulary.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._index = {token_id: index for index, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self.token_ids: NDArray[np.int64] = np.fromiter(self._index, np.int64)
        self.counts = np.zeros(len(self.token_ids), np.float32)

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = len(self._index)
            self.token_ids = np.append(self.token_ids, token_id)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[index] += 1

    def after(self, tokens: Collection[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return `token_ids` and `counts` as they would be after adding `tokens`."""
        if not tokens:
            return self.token_ids, self.counts
        new = [token for token in dict.fromkeys(tokens) if token not in self._index]
        token_ids = np.append(self.token_ids, np.array(new, np.int64))
        counts = np.append(self.counts, np.zeros(len(new), np.float32))
        for token in tokens:
            counts[self._index[token] if token in self._index else len(self._index) + new.index(token)] += 1
        return token_ids, counts


@dataclass
class Times:
    """The moments of a sequence, in seconds of `time.perf_counter`; None if not reached yet."""

    # the lambda looks up perf_counter at each call, because tests replace it
    arrived: float = field(default_factory=lambda: time.perf_counter())
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def since_arrival(self, now: float) -> Timing:
        """Return the durations from the arrival of the sequence up to each moment and `now`."""
        return Timing(
            None if self.started is None else self.started - self.arrived,
            None if self.first_token is None else self.first_token - self.arrived,
            now - self.arrived,
        )


@dataclass
class PromptProgress:
    """The part of a sequence's prompt that is computed.

    Attributes:
        cached_tokens: the number of tokens that the prefix cache had; None before the first step.
        chunks: the chunks in which the other tokens were computed.
        logprobs: one entry per token after the first, if requested.
        computed: the whole prompt is in the cache.
    """

    cached_tokens: int | None = None
    chunks: list[PromptChunk] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: bool = False


class SamplingState:
    """The state that sampling depends on besides the logits: random numbers, token counts and the guide.

    Attributes:
        counts: the counts of the sequence's tokens, if it has penalties.
        guide: the sequence's position in its grammar, if it has one.
        allowed: int64 [tokens], the only tokens that may be generated; None if all may.
    """

    def __init__(self, request: GenerateRequest, index: int) -> None:
        params = request.params
        # Each sequence has its own generator, so its random numbers depend only on seed and index, not on the batch.
        self._random = np.random.Generator(
            np.random.Philox(np.random.SeedSequence(params.seed, spawn_key=(index,) if index else ()))
        )
        self._uniforms: deque[float] = deque()  # random numbers of the next tokens
        self.counts = TokenCounts(request.prompt_ids) if params.has_penalties else None
        self.guide = request.guide.copy() if request.guide else None
        self.allowed = np.array(params.allowed_token_ids, np.int64) if params.allowed_token_ids else None

    def uniform(self, ahead: int) -> float:
        """Return the random number in [0, 1) for the token that follows `ahead` draft tokens."""
        while len(self._uniforms) <= ahead:
            self._uniforms.append(self._random.random())
        return self._uniforms[ahead]

    def append(self, token_id: int) -> None:
        """Consume a token's random number, and count the token."""
        if self._uniforms:
            self._uniforms.popleft()
        if self.counts:
            self.counts.add(token_id)


class Sequence:
    """The prompt and the generated tokens of a completion. The first `computed` of them are in the cache.

    Uncommitted steps compute `launched` more tokens and will add `expected` tokens (0 or 1), whose ids are unknown
    until they are sampled. The properties for the scheduler include both.

    A request of `n` completions has `n` sequences. The first computes the prompt. The others then start from the prefix
    cache and compute the last few tokens of the prompt again, because a block that is not full has only one writer.
    """

    def __init__(
        self,
        request: GenerateRequest,
        number: int,
        index: int,
        hashes: BlockHashes,
        stop: StopCondition,
        client: str = "",
        priority: int = 0,
    ) -> None:
        self.request = request
        self.number = number  # numbers follow the order of arrival
        self.index = index
        self.client = client
        self.priority = min(max(priority, -MOST_PRIORITY), MOST_PRIORITY)
        self.times = Times()
        # The place among the waiting sequences of the same client. A priority is worth a time, so that a sequence that
        # has waited long enough goes first, whatever its priority.
        self.rank = (self.times.arrived + PRIORITY_SECONDS * self.priority, number)
        self.order = (0.0, self.rank)  # the place among running sequences; the scheduler sets it on joining
        self.token_ids = list(request.prompt_ids)
        self.computed = 0
        self.began_at = 0  # number of tokens that the prefix cache had when the sequence joined
        self.launched = 0
        self.expected = 0
        self.ended = False  # finished or failed; results of a step that still runs are discarded
        self._most_tokens = len(self.token_ids) + request.max_new_tokens
        # A preempted sequence computes its tokens again. The statistics of tokens before `observed` are counted
        # already.
        self.observed = len(request.prompt_ids) if index else 0
        self.prompt = PromptProgress()
        self.sampling = SamplingState(request, index)
        self.stop = stop
        self.attention: AttentionTotals | None = None
        self._hashes = hashes
        self._registered = 0  # number of blocks registered in the prefix cache
        self._lookup: PromptLookup | None = None

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def length(self) -> int:
        """The number of tokens to compute, the expected token included. The last possible token is never computed."""
        length = len(self.token_ids) + self.expected
        return length - 1 if self.expected and length == self._most_tokens else length

    @property
    def scheduled(self) -> int:
        """The number of tokens that are in the cache or that uncommitted steps add to it."""
        return self.computed + self.launched

    @property
    def remaining(self) -> int:
        """The number of tokens that no step computes yet: 1 in decoding, more in the prompt or after a preemption."""
        return self.length - self.computed - self.launched

    @property
    def generated(self) -> int:
        """The number of generated tokens."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def deadline(self) -> float | None:
        """The moment when the time limit ends, in seconds of `time.perf_counter`; None without a limit."""
        limit = self.request.params.time_limit_ms
        return None if limit is None else self.times.arrived + limit / 1000

    @property
    def missing_prompt_logprobs(self) -> int:
        """The number of requested prompt logprobs that no step computes yet. The first token has none."""
        requested = self.request.params.prompt_logprobs is not None and self.index == 0
        return len(self.request.prompt_ids) - 1 - self.scheduled_prompt_logprobs if requested else 0

    @property
    def scheduled_prompt_logprobs(self) -> int:
        """The number of prompt logprobs that are computed or that uncommitted steps compute, if they are requested."""
        return max(len(self.prompt.logprobs), min(self.scheduled, len(self.request.prompt_ids) - 1))

    @property
    def largest_chunk(self) -> int:
        """The maximum number of tokens that this sequence may compute in one step."""
        return PROMPT_LOGPROBS_CHUNK if self.missing_prompt_logprobs else NO_LIMIT

    @property
    def cacheable(self) -> list[bytes]:
        """The hashes of the blocks that need not be computed if the prefix cache has them.

        The last token is always computed, because its logits are needed. So are tokens whose logprobs are requested.
        """
        tokens = len(self.prompt.logprobs) if self.missing_prompt_logprobs else len(self.token_ids) - 1
        return self._hashes.up_to(self.token_ids, tokens)

    def draft(self, most: int) -> list[int]:
        """Return up to `most` draft tokens. If the sequence has a guide, it allows all of them."""
        most = min(most, self.request.max_new_tokens - self.generated - 1)
        if most < 1 or not self.generated:
            return []
        if self._lookup is None:
            self._lookup = PromptLookup(self.token_ids)
        draft, guide = self._lookup.draft(most), self.sampling.guide
        return draft[: guide.accepts(draft)] if guide else draft

    def start(self, shared_blocks: int, block_size: int) -> None:
        """Begin to run: the first `shared_blocks` blocks of the prompt are taken as computed, from the prefix cache."""
        self.computed = self.began_at = shared_blocks * block_size
        self._registered = shared_blocks
        if self.prompt.cached_tokens is None:
            self.prompt.cached_tokens = self.computed

    def advance(self, tokens: int) -> tuple[int, list[bytes]]:
        """Count tokens as computed. Return the index of the first newly full block, and the hashes of all of them."""
        self.computed += tokens
        self.observed = max(self.observed, self.computed)
        first, hashes = self._registered, self._hashes.up_to(self.token_ids, self.computed)
        self._registered = len(hashes)
        return first, hashes[first:]

    def append(self, token_id: int) -> tuple[str, Ending | None]:
        """Append a generated token. Return the text that is now final, and the reason if the sequence finished."""
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
        """Add the attention statistics of this sequence's tokens to its summary."""
        totals = add_up(rows)
        self.attention = totals if self.attention is None else self.attention + totals

    def completed(self) -> Completed:
        """Return the numbers of this sequence for the metrics, at its end."""
        times, prefill, decode = self.times, None, None
        if times.started is not None and times.first_token is not None and times.last_token is not None:
            prefill, decode = times.first_token - times.started, times.last_token - times.first_token
        return Completed(len(self.request.prompt_ids), self.generated, prefill, decode, self.request_id)

    def finished(self, reason: FinishReason, matched: str | int | None, now: float, *, last: bool) -> Finished:
        """Return the event that ends this sequence at time `now` (`time.perf_counter`).

        `last` says that it is the last sequence of its request to end. `matched` is the stop string or stop token that
        ended it, None for another reason.
        """
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
