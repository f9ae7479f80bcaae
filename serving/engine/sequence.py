"""`Sequence`: one answer to a request and how far it has come."""

import time
from collections import deque

import numpy as np

from sharp.serving.api.attention import AttentionRows, AttentionTotals, add_up
from sharp.serving.api.events import Finished, FinishReason, PromptChunk, Timing, TokenLogprobs, Usage
from sharp.serving.api.request import Request
from sharp.serving.engine.answer import AnswerText
from sharp.serving.engine.prefix import PrefixChain
from sharp.serving.engine.token_counts import TokenCounts
from sharp.serving.engine.token_history import TokenHistory
from sharp.serving.text.tokenizer import Tokenizer

# Logits of a whole prompt would fill the memory: with `prompt_logprobs` it is computed in chunks of at most this, and
# all such chunks of a step together have no more tokens than these.
PROMPT_LOGPROBS_CHUNK, PROMPT_LOGPROBS_TOKENS = 64, 256
NO_LIMIT = 2**31
Ending = tuple[FinishReason, str | int | None]  # why an answer ended, and the stop string or token that was found


class Sequence:
    """The tokens of prompt and answer; `computed` of them are in the cache.

    A request of `n` answers has `n` sequences. The first computes the prompt; the others start from what the prefix
    cache then has of it, so they compute its last few tokens again: a block that is not full has one writer.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        index: int,
        chain: PrefixChain,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        params = request.params
        self.request = request
        self.number = number  # in the order of arrival
        self.index = index
        self.order = (request.priority, number)
        self.token_ids = list(request.prompt_ids)
        self.computed = 0
        # A preempted sequence computes its tokens again; those before this one have been observed.
        self.observed = len(request.prompt_ids) if index else 0
        self.cached_tokens: int | None = None
        self.stop_token_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        # No text shows special tokens, so a stop string that is one is looked for by its id.
        self._stop_strings = tokenizer.special_tokens(params.stop) if tokenizer and params.stop else {}
        # One generator per answer: its draws depend on seed and index and on nothing else in the batch.
        self._random = np.random.Generator(
            np.random.Philox(np.random.SeedSequence(params.seed, spawn_key=(index,) if index else ()))
        )
        self._drawn: deque[float] = deque()  # the numbers of the next tokens
        self._history: TokenHistory | None = None
        self.counts = TokenCounts(request.prompt_ids) if params.has_penalties else None
        self.guide = request.guide.copy() if request.guide else None
        self.prompt_read = False
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prompt_chunks: list[PromptChunk] = []
        self._chain = chain
        self._remembered = 0
        self._text = AnswerText(
            tokenizer, params.stop, request.prompt_ids[-1], show_stop=params.include_stop_str_in_output
        )
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.attention: AttentionTotals | None = None

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def remaining(self) -> int:
        """Tokens that are not in the cache yet: 1 while decoding, more in the prompt or after a preemption."""
        return len(self.token_ids) - self.computed

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def deadline(self) -> float | None:
        """When the time limit is over, in seconds of `time.perf_counter`."""
        limit = self.request.params.time_limit_ms
        return None if limit is None else self.arrived + limit / 1000

    @property
    def missing_prompt_logprobs(self) -> int:
        """How many logprobs of the prompt are wanted and not there yet; nothing predicts its first token."""
        wanted = self.request.params.prompt_logprobs is not None and self.index == 0
        return len(self.request.prompt_ids) - 1 - len(self.prompt_logprobs) if wanted else 0

    @property
    def largest_chunk(self) -> int:
        """Most tokens that this sequence may compute in one step."""
        return PROMPT_LOGPROBS_CHUNK if self.missing_prompt_logprobs else NO_LIMIT

    @property
    def cacheable(self) -> list[bytes]:
        """The hashes of the blocks that need not be computed if the cache has them.

        The last token is always computed, for its logits, and so are those whose logprobs are wanted.
        """
        tokens = len(self.prompt_logprobs) if self.missing_prompt_logprobs else len(self.token_ids) - 1
        return self._chain.upto(self.token_ids, tokens)

    def draft(self, most: int) -> list[int]:
        """Guess what follows the tokens that there are, at most `most` tokens."""
        most = min(most, self.request.max_new_tokens - self.generated - 1)
        if most < 1 or not self.generated:
            return []
        if self._history is None:
            self._history = TokenHistory(self.token_ids)
        guess = self._history.guess(most)
        return guess[: self.guide.accepts(guess)] if self.guide else guess

    def uniform(self, ahead: int) -> float:
        """The random number from 0 to below 1 of the token that comes after `ahead` others."""
        while len(self._drawn) <= ahead:
            self._drawn.append(self._random.random())
        return self._drawn[ahead]

    def join(self, shared_blocks: int, block_size: int) -> None:
        """Begin to run with blocks of the prefix cache."""
        self.computed = shared_blocks * block_size
        self._remembered = shared_blocks
        if self.cached_tokens is None:
            self.cached_tokens = self.computed

    def advance(self, tokens: int) -> tuple[int, list[bytes]]:
        """Count tokens as computed; return the blocks that became full: the first one, and the hashes of all."""
        self.computed += tokens
        self.observed = max(self.observed, self.computed)
        first, hashes = self._remembered, self._chain.upto(self.token_ids, self.computed)
        self._remembered = len(hashes)
        return first, hashes[first:]

    def append(self, token_id: int) -> tuple[str, Ending | None]:
        """Add a generated token; return the text to show now, and why and by what the answer ended."""
        self.token_ids.append(token_id)
        if self._drawn:
            self._drawn.popleft()
        if self._history:
            self._history.append(token_id)
        if self.counts:
            self.counts.add(token_id)
        may_stop = self.generated > self.request.params.min_tokens
        if token_id in self.stop_token_ids or (may_stop and token_id in self._stop_strings):
            text, found = self._stopped(token_id)
            return text, (FinishReason.STOP, found)
        text, matched = self._text.push(token_id, may_stop=may_stop)
        if matched is not None:
            return text, (FinishReason.STOP, matched)
        complete = self.guide.accept(token_id) if self.guide else False
        if not complete and self.generated < self.request.max_new_tokens:
            return text, None
        rest, matched = self._text.end()
        stopped = complete or matched is not None
        return text + rest, (FinishReason.STOP if stopped else FinishReason.LENGTH, matched)

    def _stopped(self, token_id: int) -> tuple[str, str | int]:
        """The last text of an answer that ends at a stop token, and what ended it."""
        show = self.request.params.include_stop_str_in_output
        text, found = self._text.push(token_id, may_stop=True) if show else ("", None)
        if found is None:
            rest, found = self._text.end()
            text += rest
        if found is not None:
            return text, found
        if token_id in self.stop_token_ids:
            return text, token_id
        string = self._stop_strings[token_id]
        return (text + string if show else text), string

    def cut(self) -> str:
        """The text that was held back, when the answer ends before its time."""
        return self._text.end()[0]

    def observe(self, rows: AttentionRows) -> None:
        """Add the statistics of tokens of this sequence to its summary."""
        totals = add_up(rows)
        self.attention = totals if self.attention is None else self.attention + totals

    def finished(self, reason: FinishReason, matched: str | int | None, now: float, *, last: bool) -> Finished:
        """The event that ends this sequence."""
        return Finished(
            self.request_id,
            reason,
            matched,
            Usage(len(self.request.prompt_ids), self.generated, self.cached_tokens or 0),
            Timing(
                None if self.started is None else self.started - self.arrived,
                None if self.first_token is None else self.first_token - self.arrived,
                now - self.arrived,
            ),
            self.attention.summary() if self.attention else None,
            self.index,
            last,
        )
