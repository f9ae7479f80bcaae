"""`Scheduler`: which sequences compute how many tokens in the next step."""

from collections import deque
from dataclasses import dataclass

from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """The next `tokens` tokens of a sequence."""

    sequence: Sequence
    tokens: int


@dataclass(frozen=True)
class Plan:
    """One step: who gives up its blocks, who joins, and what is computed."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]


class Scheduler:
    """First come, first served, within a budget of tokens per step.

    A prompt that is larger than what is left of the budget is computed in chunks, and nobody joins before it is done:
    only the last of the running sequences can be in its prompt, the others decode. So every one of them gets its next
    token in every step, and the prompt gets the rest of the budget.

    When blocks run out, the youngest sequence gives its blocks back and computes its tokens again later. The oldest is
    never preempted and every request fits an empty cache, so there is always progress.
    """

    def __init__(self, blocks: BlockManager, max_batch_tokens: int, max_sequences: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """What to do in the next step; changes nothing."""
        staying, preempted, free = self._make_room()
        budget = self._max_batch_tokens
        chunks: list[Chunk] = []
        for sequence in staying:
            tokens = min(sequence.remaining, budget)
            if tokens:
                chunks.append(Chunk(sequence, tokens))
                budget -= tokens

        admitted: list[Sequence] = []
        for sequence in self.waiting if not preempted else ():
            together = len(staying) + len(admitted)
            missing = self._blocks.missing(sequence.request_id, len(sequence.token_ids))
            # One spare block per running sequence, or the newcomer would soon be preempted again.
            if not budget or together >= self._max_sequences or missing + together > free:
                break
            tokens = min(sequence.remaining, budget)
            admitted.append(sequence)
            chunks.append(Chunk(sequence, tokens))
            budget -= tokens
            free -= missing
        return Plan(tuple(chunks), tuple(preempted), tuple(admitted))

    def _make_room(self) -> tuple[list[Sequence], list[Sequence], int]:
        """Who stays, who gives up its blocks so that they can, and how many blocks are then free."""
        staying, preempted = list(self.running), []
        free = self._blocks.free
        needed = 0
        position = 0
        while position < len(staying):
            sequence = staying[position]
            missing = self._blocks.missing(sequence.request_id, len(sequence.token_ids))
            if needed + missing <= free:
                needed += missing
                position += 1
                continue
            youngest = staying.pop()
            preempted.append(youngest)
            free += len(self._blocks.table(youngest.request_id))
        return staying, preempted, free - needed

    def reserve(self, plan: Plan) -> None:
        """Carry out what a plan says about blocks and queues."""
        for sequence in plan.preempted:  # youngest first, so that the queue stays in order of arrival
            self._blocks.release(sequence.request_id)
            self.running.remove(sequence)
            sequence.computed = 0
            self.waiting.appendleft(sequence)
        for sequence in plan.admitted:
            self.waiting.remove(sequence)
            self.running.append(sequence)
        for chunk in plan.chunks:
            # All tokens of a prompt get their blocks at once: half-computed prompts cannot starve each other.
            self._blocks.grow(chunk.sequence.request_id, len(chunk.sequence.token_ids))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._blocks.release(sequence.request_id)
