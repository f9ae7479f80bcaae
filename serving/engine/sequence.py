"""`Sequence`: a request and how far it has come."""

import time

import numpy as np

from sharp.serving.attention import AttentionRows, AttentionTotals, add_up
from sharp.serving.detokenizer import Detokenizer
from sharp.serving.engine.events import Finished, FinishReason, Timing, Usage
from sharp.serving.request import Request
from sharp.serving.stop_strings import StopStrings
from sharp.serving.tokenizer import Tokenizer


class Sequence:
    """The tokens of one request, prompt and answer; `computed` of them are in the cache."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]) -> None:
        self.request = request
        self.token_ids = list(request.prompt_ids)
        self.computed = 0
        # A preempted sequence computes its tokens again; those before this one have been observed.
        self.observed = 0
        self.stop_token_ids = frozenset(request.params.stop_token_ids) | (
            frozenset() if request.params.ignore_eos else frozenset(eos_token_ids)
        )
        # One generator per request: its draws depend on the seed and on nothing else in the batch.
        self.random = np.random.Generator(np.random.Philox(request.params.seed))
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._stop_strings = StopStrings(request.params.stop)
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

    def append(self, token_id: int) -> tuple[str, tuple[FinishReason, str | int | None] | None]:
        """Add a generated token; return the text to show now, and why and by what the answer ended."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            return self._rest(), (FinishReason.STOP, token_id)
        text, matched = self._stop_strings.push(self._detokenizer.push(token_id) if self._detokenizer else "")
        if matched is not None:
            return text, (FinishReason.STOP, matched)
        if self.generated < self.request.max_new_tokens:
            return text, None
        rest, matched = self._stop_strings.push(self._detokenizer.flush() if self._detokenizer else "")
        if matched is not None:
            return text + rest, (FinishReason.STOP, matched)
        return text + rest + self._stop_strings.flush(), (FinishReason.LENGTH, None)

    def _rest(self) -> str:
        """The text before a stop token, which is not shown itself."""
        text, matched = self._stop_strings.push(self._detokenizer.flush() if self._detokenizer else "")
        return text if matched is not None else text + self._stop_strings.flush()

    def observe(self, rows: AttentionRows) -> None:
        """Add the statistics of tokens of this sequence to its summary."""
        totals = add_up(rows)
        self.attention = totals if self.attention is None else self.attention + totals

    def finished(self, reason: FinishReason, matched: str | int | None, now: float) -> Finished:
        """The event that ends this sequence."""
        return Finished(
            self.request_id,
            reason,
            matched,
            Usage(len(self.request.prompt_ids), self.generated),
            Timing(
                None if self.started is None else self.started - self.arrived,
                None if self.first_token is None else self.first_token - self.arrived,
                now - self.arrived,
            ),
            self.attention.summary() if self.attention else None,
        )
