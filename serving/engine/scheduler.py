"""`Scheduler`: decides which sequences compute how many tokens in the next step."""

from bisect import insort
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.fair_queue import FairQueue, Order
from sharp.serving.engine.sequence import PROMPT_LOGPROBS_TOKENS, Sequence

ORDER = attrgetter("order")
SHORT = 4  # a prompt is short if it is at most 1/SHORT as long as the first prompt; the two are then computed together
MOST_OVERTAKEN = 16  # maximum number of waiting prompts that a short prompt may overtake
# The maximum number of blocks of the sequences that join in one step, if several join. Each block is hashed, looked up
# and counted, which takes some 10 ms for this number. Without the limit, 128 completions of a long prompt delayed all
# other requests by a second.
MOST_JOINING_BLOCKS = 2**13


class _TokensNeededError(Exception):
    """The next step cannot be planned before the tokens of the running step are known."""


@dataclass(frozen=True)
class Chunk:
    """The tokens of a sequence that one step computes: `tokens` tokens from position `start` on, then draft tokens.

    Attributes:
        samples: the step samples the token that follows this chunk.
        unknown: the last token of the chunk is sampled by the previous step, which is still running.
    """

    sequence: Sequence
    start: int
    tokens: int
    draft: tuple[int, ...] = ()
    samples: bool = False
    unknown: bool = False

    @property
    def width(self) -> int:
        """The number of tokens that the model computes, draft tokens included."""
        return self.tokens + len(self.draft)


@dataclass(frozen=True)
class StepPlan:
    """A planned step: the chunks to compute, the sequences preempted for it and the sequences that joined."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]


class Scheduler:
    """A scheduler that chooses clients by their shares, then sequences by rank, within a budget of tokens per step.

    The rank of a sequence among those of its client is `Sequence.rank`: its priority and its time of arrival.

    Neither decoding nor prefill waits for the other. In every step each decoding sequence computes its one token.
    Prompts are computed in chunks from the rest of the budget: at most `prefill_chunk_tokens` while other sequences
    decode, so that a long prompt does not delay their next tokens. `max_batch_tokens` is at least `max_sequences`, so
    some budget is always left for prompts.

    No sequence joins before the prompts ahead of it are computed, with one exception: short prompts. A prompt is short
    if it has at most a quarter of the tokens that the first prompt has left, with the same priority. Short prompts
    share half of the prefill budget, because they would otherwise wait for all of a long prompt. The long prompt keeps
    the other half, so it takes at most twice its time.

    When blocks run out, the last sequence of the client that holds most blocks is preempted: it gives its blocks back
    and computes its tokens again later, except for those still in the prefix cache. The first sequence in order is
    never preempted, and every request fits an empty cache, so there is always progress. A waiting sequence preempts
    running sequences of the same client with a worse priority, and running sequences of clients that run more
    sequences, or hold more blocks, than its own client.

    If all sequences decode, the step has up to `speculative_tokens` draft tokens, divided evenly among the sequences.
    Draft tokens cost little while few sequences decode, because the weights are read anyway. With many sequences the
    division leaves none.

    A step can be planned while another step runs, on the assumption that no sequence ends except by its length.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_batch_tokens: int,
        max_sequences: int,
        prefill_chunk_tokens: int,
        speculative_tokens: int = 0,
    ) -> None:
        self.waiting = FairQueue()
        self.running: list[Sequence] = []  # sorted by `Sequence.order`
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._speculative_tokens = speculative_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks. A sequence that was never queued is ignored."""
        if sequence in self.running:
            self.running.remove(sequence)
        self.waiting.remove(sequence)
        self._blocks.release(sequence.number)

    def schedule(self) -> StepPlan:
        """Choose the next step and update blocks and queues accordingly.

        A plan without chunks does nothing. While a step runs, an empty plan may also mean that the tokens of that step
        are needed first, because one of its sequences would be preempted or have a draft.
        """
        preempted: list[Sequence] = []
        admitted: list[Sequence] = []
        chunks: list[Chunk] = []
        with suppress(_TokensNeededError):
            self._make_room(preempted)
            self._admit(preempted, admitted)
            chunks = self._chunks()
        return StepPlan(tuple(chunks), tuple(preempted), tuple(admitted))

    def _admit(self, preempted: list[Sequence], admitted: list[Sequence]) -> None:
        """Let waiting sequences join, unless a sequence had to be preempted.

        Sequences that join are appended to `admitted`, and those preempted for them to `preempted`.
        """
        joining = 0
        while self.waiting and not preempted and joining < MOST_JOINING_BLOCKS:
            sequence = self._next()
            if sequence is None:
                break
            self._make_way(sequence, preempted)
            shared = self._blocks.cached(sequence.cacheable)
            if not self._fits(sequence, shared):
                break
            self.waiting.admit(sequence, len(sequence.token_ids) - len(shared) * self._blocks.block_size)
            insort(self.running, sequence, key=ORDER)
            self._blocks.share(sequence.number, shared)
            # A prompt gets the blocks of all its tokens at once, so that half-computed prompts cannot starve each
            # other.
            self._blocks.grow(sequence.number, len(sequence.token_ids))
            sequence.start(len(shared), self._blocks.block_size)
            joining += len(self._blocks.table(sequence.number))
            admitted.append(sequence)

    def _make_room(self, preempted: list[Sequence]) -> None:
        """Give running sequences the blocks for their next tokens; add those that must yield to `preempted`."""
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            if self._blocks.missing(sequence.number, sequence.length) > self._blocks.free:
                victim = self._largest_holder()
                position -= self.running.index(victim) < position
                preempted.append(self._preempt(victim))  # at worst `sequence` itself
            else:
                self._blocks.grow(sequence.number, sequence.length)
                position += 1

    def _largest_holder(self) -> Sequence:
        """Return the last sequence of the client that holds most blocks.

        It is not the first running sequence unless no other runs, because that sequence guarantees progress.
        """
        if len(self.running) == 1:
            return self.running[0]
        groups = self.waiting.running_of().values()
        others = [[sequence for sequence in group if sequence is not self.running[0]] for group in groups]
        return max(filter(None, others), key=lambda group: (self._held(group), group[-1].order))[-1]

    def _held(self, sequences: Iterable[Sequence]) -> int:
        """Return the number of blocks that `sequences` hold; a block that several of them share counts for each."""
        return sum(len(self._blocks.table(sequence.number)) for sequence in sequences)

    def _preempt(self, sequence: Sequence) -> Sequence:
        """Release a running sequence's blocks, queue it again and return it.

        Raises:
            _TokensNeededError: a step with it is under way.
        """
        if sequence.launched:
            raise _TokensNeededError
        self.running.remove(sequence)
        self._blocks.release(sequence.number)
        sequence.computed = 0
        self.waiting.add(sequence)
        return sequence

    def _make_way(self, sequence: Sequence, preempted: list[Sequence]) -> None:
        """Preempt running sequences until `sequence` fits, or none if it would not fit even then.

        The preempted sequences are those of the same client with a worse priority, and those of clients that run more
        sequences, or hold more blocks, than the client of `sequence` would.
        """
        victims: list[Sequence] = []
        shared = self._blocks.cached(sequence.cacheable)
        if self._fits(sequence, shared):
            return
        missing = self._blocks.missing(sequence.number, len(sequence.token_ids)) - len(shared)
        groups = self.waiting.running_of()
        own = groups.pop(sequence.client, [])
        worse = [other for other in own if other.priority > sequence.priority and other.rank > sequence.rank]
        # This estimate counts blocks that other sequences hold, too, although preempting does not free them. So the
        # loop below ends as soon as `sequence` fits, and `_admit` checks once more.
        while not self._room(victims, missing, shared):
            if worse:
                victims.append(worse.pop())
                continue
            full = len(self.running) - len(victims) >= self._max_sequences
            richest = max(groups.values(), key=len if full else self._held, default=[])
            least = len(own) + 1 if full else self._held(own) + missing
            if not richest or (len(richest) if full else self._held(richest)) <= least:
                return
            victims.append(richest.pop())
        for victim in victims:
            if self._fits(sequence, self._blocks.cached(sequence.cacheable)):
                break
            preempted.append(self._preempt(victim))

    def _room(self, victims: list[Sequence], missing: int, shared: list[int]) -> bool:
        """Whether a sequence that lacks `missing` blocks fits after `victims` have given theirs back.

        `shared` are blocks of the prefix cache that it would use, which do not count as free.
        """
        running = len(self.running) - len(victims)
        free = self._blocks.free_without(shared) + self._held(victims)
        return running < self._max_sequences and missing + running <= free

    def _fits(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether a waiting sequence can start, given the cached blocks `shared` of its prefix."""
        if len(self.running) >= self._max_sequences:
            return False
        missing = self._blocks.missing(sequence.number, len(sequence.token_ids)) - len(shared)
        # Keep one spare block per running sequence; otherwise the new sequence would soon be preempted again.
        return missing + len(self.running) <= self._blocks.free_without(shared)

    def _next(self) -> Sequence | None:
        """Return the waiting sequence that may join now, or None."""
        (first,) = self.waiting.first(1)
        if self._prompt_budget_before(first) > 0:
            return first
        prompts = self._prompts()
        if (
            sum(prompt.remaining for prompt in prompts[1:]) >= self._short_budget()
            # No budget is left for another short prompt.
        ):
            return None
        for sequence in self.waiting.first(MOST_OVERTAKEN + 1):
            cached = len(self._blocks.cached(sequence.cacheable)) * self._blocks.block_size
            if _much_shorter(prompts[0], sequence, len(sequence.token_ids) - cached):
                return sequence
        return None

    def _prompts(self) -> list[Sequence]:
        """Return the running prompts, first the prompt with the fewest tokens computed since its virtual time."""
        return sorted((sequence for sequence in self.running if sequence.remaining > 1), key=_progress)

    def _short_budget(self) -> int:
        """Return the prompt tokens of a step that short prompts may take first: half of the budget."""
        return self._prompt_budget() // 2

    def _prompt_budget(self) -> int:
        """Return the maximum number of prompt tokens that the next step may compute."""
        decoding = sum(sequence.remaining == 1 for sequence in self.running)
        budget = self._max_batch_tokens - decoding
        return min(budget, self._prefill_chunk_tokens) if decoding else budget

    def _prompt_budget_before(self, newcomer: Sequence) -> int:
        """Return the prompt budget that remains after the running prompts ahead of `newcomer`."""
        order = self.waiting.order_of(newcomer)
        before = (other for other in self.running if other.remaining > 1 and _progress(other) < order)
        return self._prompt_budget() - sum(min(sequence.remaining, sequence.largest_chunk) for sequence in before)

    def _chunks(self) -> list[Chunk]:
        """Return the chunks of the next step: one token per decoding sequence, and the remaining budget for prompts."""
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
                if samples:
                    self.waiting.charge(sequence, 1 + len(draft))
        return chunks

    def _draft_tokens(self) -> int:
        """Return the maximum number of draft tokens per sequence in a step in which all sequences decode."""
        decoding = len(self.running)
        return min(self._speculative_tokens, self._max_batch_tokens - decoding) // max(decoding, 1)

    def _draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return a sequence's draft: at most `most` tokens, and what free blocks hold without a preemption."""
        if not most:
            return ()
        if sequence.expected:
            raise _TokensNeededError
        draft = sequence.draft(most)
        tokens = len(sequence.token_ids)
        # Keep one spare block per running sequence, because the blocks of a rejected draft stay allocated.
        while draft and (missing := self._blocks.missing(sequence.number, tokens + len(draft))):
            if missing + len(self.running) <= self._blocks.free:
                break
            draft.pop()
        self._blocks.grow(sequence.number, tokens + len(draft))
        return tuple(draft)

    def _shares(self) -> dict[int, int]:
        """Return the tokens of each prompt by sequence number: half of the budget for short prompts, then in order."""
        prompts, budget, shares = self._prompts(), self._prompt_budget(), {}
        short = [prompt for prompt in prompts[1:] if _much_shorter(prompts[0], prompt, prompt.remaining)]
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


def _progress(sequence: Sequence) -> Order:
    """Return the place of a running prompt: its virtual time plus the tokens computed since it joined, and its rank."""
    return sequence.order[0] + sequence.scheduled - sequence.began_at, sequence.rank


def _much_shorter(first: Sequence, other: Sequence, tokens: int) -> bool:
    """Whether `other`, with `tokens` prompt tokens left, is short enough to be computed along with `first`."""
    return other.priority == first.priority and SHORT * tokens <= first.remaining
