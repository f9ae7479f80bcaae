"""`Guide`: the tokens that may come next in a text that must match a schema, a regular expression or a grammar."""

import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from sharp.core.errors import is_panic
from sharp.core.manifest import Manifest
from sharp.serving.api.errors import FieldError, QueueFullError
from sharp.serving.api.guided import Guided
from sharp.serving.api.json_formats import with_real_dates
from sharp.serving.engine.guide_trial import GuideTrial
from sharp.serving.engine.guide_worker import make_matcher, make_vocabulary
from sharp.serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LONGEST_ERROR = 300
NO_TEXT = {"NoExtensionBias": "no text matches it"}  # error names of llguidance that tell a user nothing
LAYOUT = "x-guidance"  # llguidance's own key in a schema
COMPILED_GUIDES = 64
COMPILED_BYTES = 256 * 2**20
GUIDE_BYTES = 2**30  # limit for the guides of all running and waiting requests
# The limit of CPU time for the masks of all sequences of a request. A mask takes well under a millisecond unless the
# grammar is ambiguous.
MASK_SECONDS, SECONDS_PER_TOKEN = 0.25, 0.005
# The limit of CPU time for all guides in one step, because all requests wait for the step. Beyond it, requests fail
# whose recent masks took more than 0.25 ms each. Masks of usual schemas and grammars take some hundredths of a
# millisecond, for any number of them.
STEP_SECONDS, DEAR_SECONDS = 0.05, 0.00025
LAST_MASKS = 8


@dataclass
class StepTime:
    """The CPU time, in seconds, that a model's guides have taken in the current step."""

    seconds: float = 0.0


@dataclass
class MaskTime:
    """The CPU time, in seconds, that a guide has taken, shared by the sequences of a request.

    Attributes:
        error: the reason, in one sentence, once a limit is exceeded; else empty.
    """

    step: StepTime
    seconds: float = 0.0
    tokens: int = 0
    # A running mean, because earlier cheap masks must not make up for expensive recent ones.
    last: float = 0.0
    error: str = ""

    def within_limits(self) -> bool:
        """Whether the guide may take more time. Once False, it stays False."""
        if not self.error:
            if self.seconds > MASK_SECONDS + SECONDS_PER_TOKEN * self.tokens:
                self._refuse(self.seconds / max(1, self.tokens), f"{SECONDS_PER_TOKEN * 1000:g} ms")
            elif self.step.seconds > STEP_SECONDS and self.last > DEAR_SECONDS:
                limit = f"{DEAR_SECONDS * 1000:g} ms where all grammars of a step take {STEP_SECONDS * 1000:g} ms"
                self._refuse(self.last, limit)
        return not self.error

    def _refuse(self, each: float, limit: str) -> None:
        """Set the error of a guide that takes `each` seconds per token; `limit` is the limit in words."""
        self.error = f"it takes {each * 1000:.2g} ms a token to follow; the limit is {limit}; simplify it"

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Count the CPU time of the `with` block."""
        began = time.thread_time()
        try:
            yield
        finally:
            took = time.thread_time() - began
            self.seconds += took
            self.step.seconds += took
            self.last += (took - self.last) / LAST_MASKS


class Guide:
    """The position of one sequence in its grammar, by which it allows or forbids next tokens.

    Only the engine's thread uses it. Sequences of one request have copies that share the time limit.
    """

    def __init__(self, matcher: LLMatcher, time_taken: MaskTime, size: int) -> None:
        """Wrap an llguidance matcher that takes `size` bytes of memory; `time_taken` adds up its request's CPU time."""
        self._matcher = matcher
        self._time = time_taken
        self.size = size

    def copy(self) -> Self:
        """Return a guide at the same position, for another sequence of the request."""
        return type(self)(self._matcher.deep_copy(), self._time, self.size)

    def for_request(self) -> Self:
        """Return a guide at the same position, for another request."""
        return type(self)(self._matcher.deep_copy(), MaskTime(self._time.step), self.size)

    def begin_step(self) -> None:
        """Start counting the time of this model's guides for a new step."""
        self._time.step.seconds = 0.0

    @property
    def error(self) -> str:
        """The reason, in one sentence, if the grammar failed or became too costly; else empty."""
        return _sentence(self._matcher.get_error()) or self._time.error

    def allowed(self, vocab_size: int, after: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return the tokens that may come next, after the tokens `after`, as bool [vocab_size]; none after an error."""
        bits = np.zeros(-(-vocab_size // 32), np.int32)
        matcher = self._matcher
        if after:
            with self._time.spend():
                matcher = matcher.deep_copy()
            for token in after:
                self._go_on(matcher, token)
        if not self._time.within_limits() or matcher.is_error():
            return np.zeros(vocab_size, np.bool_)
        with self._time.spend():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            return np.zeros(vocab_size, np.bool_)
        return np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may come next, one after the other, stopping early if the check is expensive."""
        before, accepted = self._time.seconds, 0
        for most in (1, len(tokens)):  # the cost of the first token predicts the cost of the others
            if accepted == most or not self._time.within_limits():
                break
            with self._time.spend():
                accepted = self._matcher.validate_tokens([*tokens[:most]])
            if accepted < most or self._time.seconds - before > DEAR_SECONDS:
                break
        return accepted

    def accept(self, token_id: int) -> bool:
        """Advance past an allowed token. Return whether the text is complete, so that nothing more may come."""
        self._go_on(self._matcher, token_id)
        self._time.tokens += 1
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _go_on(self, matcher: LLMatcher, token_id: int) -> None:
        """Advance the matcher by a token, and count the time, unless the guide is over its limits."""
        if self._time.within_limits():  # beyond the limits no mask allows any token
            with self._time.spend():
                matcher.consume_token(token_id)


class GuideCompiler:
    """The compiler of a model's guides. Thread-safe, but the engine's thread must not wait for it."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer | None, *, compact: bool = True) -> None:
        """Compile guides for the model of `manifest`. If `compact`, JSON has no blanks unless a schema allows them."""
        self._manifest = manifest
        self._compact = compact
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        # Added tokens that are written like tags. They have a visible text, but llguidance does not treat them as text.
        self._tags: dict[str, int] = {}
        self._trial: GuideTrial | None = None
        self._failure = ""  # reason why there are no guides, as a sentence
        self._step = StepTime()
        # Most servers see the same few schemas again and again. The oldest entry is removed first. Each entry has the
        # guide and its size in bytes; a text that cannot be compiled is kept, too, as its error.
        self._compiled: dict[Guided, tuple[Guide | str, int]] = {}
        self._live_bytes = 0

    def load(self) -> None:
        """Load the vocabulary now, if guides are possible. This blocks all other Python threads for a second.

        If llguidance cannot use the tokenizer, this logs a warning, and requests with a guide are refused.
        """
        with suppress(FieldError):
            self._loaded()

    @property
    def available(self) -> bool:
        """Whether requests may have guides."""
        manifest = self._manifest
        return self._tokenizer is not None and bool(manifest.tokenizer.eos_token_ids) and not self._failure

    def end(self) -> None:
        """Stop the running trial, and compile nothing more."""
        if self._trial is not None:
            self._trial.end()

    def compile(self, guided: Guided) -> Guide:
        """Return the guide of a request.

        Raises:
            FieldError: the schema, expression or grammar is not valid or takes too much to compile, or the model has no
                tokenizer or no end-of-sequence token.
            QueueFullError: too many grammars wait to be compiled, the machine is too busy, or guides of running
                requests take too much memory.
            EngineError: the process that compiles grammars does not start.
            UnavailableError: that process was killed, or `end` was called.
        """
        with self._lock:
            known = self._compiled.get(guided)
        if known is None:
            known = self._compile(guided)
            with self._lock:
                self._compiled[guided] = known
                self._shrink()
        found, size = known
        if isinstance(found, str):
            name = f"guided.{guided.kind}"
            raise FieldError(name, f"{name} cannot be used: {found}")
        guide = found.for_request()
        with self._lock:
            if self._live_bytes + size > GUIDE_BYTES:
                message = f"the schemas and grammars of running requests take {self._live_bytes >> 20} MB"
                raise QueueFullError(f"{message}; the limit is {GUIDE_BYTES >> 20} MB; try again in 1 s", 1.0)
            self._live_bytes += size
        weakref.finalize(guide, self._release, size)
        return guide

    def _release(self, size: int) -> None:
        """Count `size` bytes of a collected guide as free."""
        # No lock is taken, because the garbage collector may call this in a thread that already holds the lock.
        self._live_bytes -= size

    def _shrink(self) -> None:
        """Remove the oldest compiled guides until their number and bytes are within the limits; one stays."""
        total = sum(size for _, size in self._compiled.values())
        while len(self._compiled) > COMPILED_GUIDES or (total > COMPILED_BYTES and len(self._compiled) > 1):
            _, size = self._compiled.pop(next(iter(self._compiled)))
            total -= size

    def _compile(self, guided: Guided) -> tuple[Guide | str, int]:
        """Return the guide, or its error in a sentence, and the guide's size in bytes."""
        vocabulary, trial = self._loaded()
        text = "\n".join([guided.text, *mark_rules(guided.marks, self._tags)])
        if guided.kind == "json":
            text = prepared_schema(text, compact=self._compact)
        outcome = trial.run(guided.kind, text)
        if outcome.error:
            return _sentence(outcome.error), 0
        return Guide(make_matcher(vocabulary, guided.kind, text), MaskTime(self._step), outcome.size), outcome.size

    def _loaded(self) -> tuple[LLTokenizer, GuideTrial]:
        """Return the vocabulary and the trial process, creating them at first use, which takes a second.

        Raises:
            FieldError: the model has no tokenizer or no end-of-sequence token, or llguidance cannot use the tokenizer.
        """
        manifest, tokenizer = self._manifest, self._tokenizer
        ends = [*manifest.tokenizer.eos_token_ids]
        if tokenizer is None or not ends:
            raise FieldError(
                "guided",
                f"guided needs text that can end, and {manifest.name} has no tokenizer for that; leave guided out",
            )
        with self._lock:
            if self._vocabulary is None or self._trial is None:
                if not self._failure:
                    self._make(tokenizer.to_json(manifest.vocab_size), ends)
                if self._failure or self._vocabulary is None or self._trial is None:
                    raise FieldError("guided", f"guided is off: {self._failure}")
            return self._vocabulary, self._trial

    def _make(self, file: str, ends: list[int]) -> None:
        """Create the vocabulary from the text of a `tokenizer.json`, or record why it cannot be created.

        `ends` are the ids of the tokens that end a completion.
        """
        size = self._manifest.vocab_size
        try:
            vocabulary = make_vocabulary(file, size, ends)
        except BaseException as error:  # a panic of llguidance is not an Exception
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            reason = _sentence(str(error)) or type(error).__name__
            self._failure = f"llguidance cannot use the tokenizer of {self._manifest.name} ({reason})"
            logger.warning("guided generation is off: %s", self._failure)
            return
        for token in json.loads(file).get("added_tokens") or ():
            token_id = token["id"]
            if not token["special"] and token_id not in ends and vocabulary.is_special_token(token_id):
                self._tags[token["content"]] = token_id
        self._vocabulary, self._trial = vocabulary, GuideTrial(file, size, ends)


def prepared_schema(text: str, *, compact: bool) -> str:
    """Return a JSON schema with the dates of the calendar, which forbids blanks if `compact` unless it says otherwise.

    Return a text that is not JSON unchanged.
    """
    try:
        schema = with_real_dates(json.loads(text))
    except (ValueError, RecursionError):
        return text  # llguidance reports what is wrong
    schema = {} if schema is True else schema
    layout = {LAYOUT: {"whitespace_flexible": False}} if compact else {}
    return json.dumps({**layout, **schema}) if isinstance(schema, dict) else text


def mark_rules(marks: Sequence[str], tags: Mapping[str, int]) -> list[str]:
    """Return the grammar rules of `Guided.marks` for a vocabulary with these `tags`.

    llguidance does not treat a tag as text, so the rules allow tags between the parts of a text. A model can also spell
    out a mark that it has a token for. The `lazy` rule ends the text there, too, because it matches as early as
    possible.
    """
    rules = [r"MARK_TEXT: /(.|\n)+/"] if marks else []
    for number, mark in enumerate(marks):
        own = tags.get(mark)
        others = ",".join(str(token_id) for text, token_id in tags.items() if text != mark)
        before = f"(MARK_TEXT? <[{others}]>)* " if others else ""
        spelled = f"spelled_mark_{number}"
        rules += [
            f"mark_{number}: " + (json.dumps(mark) if own is None else f"<[{own}]>"),
            f"to_mark_{number}: {before}" + (spelled if own is None else f"({spelled} | MARK_TEXT? <[{own}]>)"),
            rf"{spelled}[lazy]: /(.|\n)*/ {json.dumps(mark)}",
            f"without_mark_{number}: {before}MARK_TEXT?",
        ]
    return rules


def _sentence(error: str) -> str:
    """Return an error of llguidance in one line: its first line, and the details that it marks with "error:"."""
    lines = error.strip().splitlines() or [""]
    details = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join([NO_TEXT.get(lines[0], lines[0]), *details])[:LONGEST_ERROR]
