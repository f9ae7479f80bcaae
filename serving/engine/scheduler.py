"""`Scheduler`: which sequences compute how many tokens in the next step."""

from bisect import insort
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.sequence import PROMPT_LOGPROBS_TOKENS, Sequence

ORDER = attrgetter("order")
SHORT = 4  # times a prompt must be shorter than the first one to be computed with it
MOST_OVERTAKEN = 16  # prompts that a short one may pass in the queue
# Blocks of those that join in one step, if they are several: each is hashed, looked up and counted, in some 10 ms in
# all. The 128 completions of a long prompt held up everybody for a second.
MOST_JOINING_BLOCKS = 2**13


class _TokensNeededError(Exception):
    """What the step under way will give must be known first."""


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a sequence, those from `start` on, and draft tokens after them.

    Attributes:
        samples: the token that follows is sampled.
        unknown: the last of the tokens is sampled by the step before, which is under way.
    """

    sequence: Sequence
    start: int
    tokens: int
    draft: tuple[int, ...] = ()
    samples: bool = False
    unknown: bool = False

    @property
    def width(self) -> int:
        """Tokens that the model computes."""
        return self.tokens + len(self.draft)


@dataclass(frozen=True)
class Plan:
    """One step: what is computed, who gave up its blocks and who joined."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]


class Scheduler:
    """By priority and then first come, first served, within a budget of tokens per step.

    Neither decoding nor prompts wait for the other: in every step each decoding sequence computes its one token, and
    prompts, in chunks, get the rest of the budget, at most `prefill_chunk_tokens` where others decode so that a long
    prompt does not hold up their next token. `max_batch_tokens` is at least `max_sequences`, so something is left.
    Nobody joins before the prompts that go first are done, but for short ones: those that have at most a quarter of
    what the first prompt has left, with the same priority, get half of the prompts' budget, or they would wait for all
    of a long one. It keeps the other half, so it takes at most twice its time.

    When blocks run out, the last in order gives its blocks back and computes its tokens again later, from what the
    prefix cache still has of them. The first in order is never preempted and every request fits an empty cache, so
    there is always progress. A waiting sequence of a better priority preempts as well; with the same priority nobody
    overtakes.

    Where all sequences decode, the step has up to `speculative_tokens` draft tokens, shared out evenly. They cost
    little while few sequences decode, as the weights are read anyway; for many there is nothing to share out.

    A step can be planned while another one is under way, on the assumption that no sequence ends but by its length.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_batch_tokens: int,
        max_sequences: int,
        prefill_chunk_tokens: int,
        speculative_tokens: int = 0,
    ) -> None:
        self.waiting: list[Sequence] = []  # both in order
        self.running: list[Sequence] = []
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._speculative_tokens = speculative_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        insort(self.waiting, sequence, key=ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks; one that was never queued is fine."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._blocks.release(sequence.number)

    def schedule(self) -> Plan:
        """Choose the next step and move blocks and sequences accordingly.

        A plan without chunks does nothing. While a step is under way it may also mean that the tokens of that one are
        needed: a sequence of it would be preempted, or have a draft.
        """
        preempted: list[Sequence] = []
        admitted: list[Sequence] = []
        chunks: list[Chunk] = []
        with suppress(_TokensNeededError):
            self._make_room(preempted)
            self._admit(preempted, admitted)
            chunks = self._chunks()
        return Plan(tuple(chunks), tuple(preempted), tuple(admitted))

    def _admit(self, preempted: list[Sequence], admitted: list[Sequence]) -> None:
        """Let waiting sequences join, as long as nobody had to give up its blocks."""
        joining = 0
        while self.waiting and not preempted and joining < MOST_JOINING_BLOCKS:
            sequence = self._next()
            if sequence is None:
                break
            self._make_way(sequence, preempted)
            shared = self._blocks.cached(sequence.cacheable)
            if not self._fits(sequence, shared):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=ORDER)
            self._blocks.share(sequence.number, shared)
            # All tokens of a prompt get their blocks at once: half-computed prompts cannot starve each other.
            self._blocks.grow(sequence.number, len(sequence.token_ids))
            sequence.start(len(shared), self._blocks.block_size)
            joining += len(self._blocks.table(sequence.number))
            admitted.append(sequence)

    def _make_room(self, preempted: list[Sequence]) -> None:
        """Give every running sequence the blocks of its tokens; some are `preempted` for that."""
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            if self._blocks.missing(sequence.number, sequence.length) > self._blocks.free:
                preempted.append(self._preempt_last())  # at worst this sequence itself
            else:
                self._blocks.grow(sequence.number, sequence.length)
                position += 1

    def _preempt_last(self) -> Sequence:
        if self.running[-1].launched:
            raise _TokensNeededError
        sequence = self.running.pop()
        self._blocks.release(sequence.number)
        sequence.computed = 0
        insort(self.waiting, sequence, key=ORDER)
        return sequence

    def _make_way(self, sequence: Sequence, preempted: list[Sequence]) -> None:
        """Preempt running sequences of worse priority until `sequence` fits, unless even that would not do."""
        worse = [other for other in self.running if other.request.priority > sequence.request.priority]
        if not worse:
            return
        blocks = self._blocks.free + sum(len(self._blocks.table(other.number)) for other in worse)
        shared = self._blocks.cached(sequence.cacheable)
        if blocks < self._blocks.missing(sequence.number, len(sequence.token_ids)) - len(shared):
            return
        while len(preempted) < len(worse) and not self._fits(sequence, self._blocks.cached(sequence.cacheable)):
            preempted.append(self._preempt_last())

    def _fits(self, sequence: Sequence, shared: list[int]) -> bool:
        if len(self.running) >= self._max_sequences:
            return False
        missing = self._blocks.missing(sequence.number, len(sequence.token_ids)) - len(shared)
        # One spare block per running sequence, or the newcomer would soon be preempted again.
        return missing + len(self.running) <= self._blocks.free_without(shared)

    def _next(self) -> Sequence | None:
        """The waiting sequence that may join now."""
        if self._prompt_budget_before(self.waiting[0]) > 0:
            return self.waiting[0]
        prompts = self._prompts()
        if sum(one.remaining for one in prompts[1:]) >= self._short_budget():  # nothing is left for another one
            return None
        for sequence in self.waiting[: MOST_OVERTAKEN + 1]:
            cached = len(self._blocks.cached(sequence.cacheable)) * self._blocks.block_size
            if _much_shorter(prompts[0], sequence, len(sequence.token_ids) - cached):
                return sequence
        return None

    def _prompts(self) -> list[Sequence]:
        return [one for one in self.running if one.remaining > 1]

    def _short_budget(self) -> int:
        return self._prompt_budget() // 2

    def _prompt_budget(self) -> int:
        """How many tokens of prompts the step may compute."""
        decoding = sum(sequence.remaining == 1 for sequence in self.running)
        budget = self._max_batch_tokens - decoding
        return min(budget, self._prefill_chunk_tokens) if decoding else budget

    def _prompt_budget_before(self, newcomer: Sequence) -> int:
        """What the running prompts that go before `newcomer` leave of that."""
        before = (one for one in self.running if one.remaining > 1 and one.order < newcomer.order)
        return self._prompt_budget() - sum(min(sequence.remaining, sequence.largest_chunk) for sequence in before)

    def _chunks(self) -> list[Chunk]:
        """Share out the budget: a token for everyone who decodes, and what is left to prompts."""
        shares, with_logprobs = self._shares(), PROMPT_LOGPROBS_TOKENS
        drafts = 0 if shares else self._draft_tokens()
        chunks = []
        for sequence in self.running:
            tokens = shares.get(sequence.number, min(sequence.remaining, 1))
            if sequence.missing_prompt_logprobs:
                tokens = min(tokens, with_logprobs)
                with_logprobs -= tokens
            if tokens:
                draft, start = self._draft(sequence, drafts), sequence.scheduled
                samples = tokens == sequence.remaining and sequence.request.max_new_tokens > 0
                unknown = start + tokens > len(sequence.token_ids)
                chunks.append(Chunk(sequence, start, tokens, draft, samples, unknown))
        return chunks

    def _draft_tokens(self) -> int:
        """Most draft tokens of each sequence where all decode."""
        decoding = len(self.running)
        return min(self._speculative_tokens, self._max_batch_tokens - decoding) // max(decoding, 1)

    def _draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """The draft of a sequence, as far as free blocks hold it: no sequence gives up blocks for another's draft."""
        if not most:
            return ()
        if sequence.expected:
            raise _TokensNeededError
        draft = sequence.draft(most)
        tokens = len(sequence.token_ids)
        # One spare block per running sequence, as for newcomers: the blocks of a rejected draft stay taken.
        while draft and (missing := self._blocks.missing(sequence.number, tokens + len(draft))):
            if missing + len(self.running) <= self._blocks.free:
                break
            draft.pop()
        self._blocks.grow(sequence.number, tokens + len(draft))
        return tuple(draft)

    def _shares(self) -> dict[int, int]:
        """Tokens for every prompt, by its sequence's number: half for short ones, the rest in order."""
        prompts, budget, shares = self._prompts(), self._prompt_budget(), {}
        short = [one for one in prompts[1:] if _much_shorter(prompts[0], one, one.remaining)]
        left = self._short_budget()
        for sequence in sorted(short, key=attrgetter("remaining")):
            shares[sequence.number] = min(sequence.remaining, sequence.largest_chunk, left)
            left -= shares[sequence.number]
        left = budget - sum(shares.values())
        for sequence in prompts:
            share = shares.get(sequence.number, 0)
            more = min(min(sequence.remaining, sequence.largest_chunk) - share, left)
            shares[sequence.number] = share + more
            left -= more
        return shares


def _much_shorter(first: Sequence, other: Sequence, tokens: int) -> bool:
    """Whether a prompt of which so many `tokens` are left need not wait for the `first` one."""
    return other.request.priority == first.request.priority and SHORT * tokens <= first.remaining
