"""`Guide`: which tokens may come next where the text must match a schema, an expression or a grammar."""

import json
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

from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import FieldError, QueueFullError
from sharp.serving.api.guided import Guided
from sharp.serving.engine.guide_trial import GuideTrial
from sharp.serving.engine.guide_worker import make_matcher, make_vocabulary
from sharp.serving.text.tokenizer import Tokenizer

LONGEST_ERROR = 300
NO_TEXT = {"NoExtensionBias": "no text matches it"}  # names of the library's that say nothing to a user
LAYOUT = "x-guidance"  # the library's own key of a schema
COMPILED_GUIDES = 64
COMPILED_BYTES = 256 * 2**20
GUIDE_BYTES = 2**30  # of all guides of running and waiting requests
# Of a processor, for the masks of all sequences of a request: a mask takes well under a millisecond where a grammar is
# not ambiguous.
MASK_SECONDS, SECONDS_PER_TOKEN = 0.25, 0.005
# Of one step, which everybody waits for, all its guides together: beyond that, requests fail whose last masks took more
# than 0.25 ms each. Usual schemas and grammars take some hundredths of a millisecond, however many there are.
STEP_SECONDS, DEAR_SECONDS = 0.05, 0.00025
LAST_MASKS = 8


@dataclass
class StepTime:
    """What the guides of a model have cost in the present step, in seconds of a processor."""

    seconds: float = 0.0


@dataclass
class MaskTime:
    """What a guide has cost, shared by the sequences of a request.

    Attributes:
        error: one sentence, once it is too much; else empty.
    """

    step: StepTime
    seconds: float = 0.0
    tokens: int = 0
    last: float = 0.0  # a running mean: what was cheap before does not pay for what is expensive now
    error: str = ""

    def within_limits(self) -> bool:
        """Whether it may take more; if not, it never may again."""
        if not self.error:
            if self.seconds > MASK_SECONDS + SECONDS_PER_TOKEN * self.tokens:
                self._refuse(self.seconds / max(1, self.tokens), f"{SECONDS_PER_TOKEN * 1000:g} ms")
            elif self.step.seconds > STEP_SECONDS and self.last > DEAR_SECONDS:
                limit = f"{DEAR_SECONDS * 1000:g} ms where all grammars of a step take {STEP_SECONDS * 1000:g} ms"
                self._refuse(self.last, limit)
        return not self.error

    def _refuse(self, each: float, limit: str) -> None:
        self.error = f"it takes {each * 1000:.2g} ms a token to follow; the limit is {limit}; simplify it"

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Count what the block takes."""
        began = time.thread_time()
        try:
            yield
        finally:
            took = time.thread_time() - began
            self.seconds += took
            self.step.seconds += took
            self.last += (took - self.last) / LAST_MASKS


class Guide:
    """Follows one sequence; only the engine's thread uses it."""

    def __init__(self, matcher: LLMatcher, time_taken: MaskTime, size: int) -> None:
        """`size` is what it takes of GUIDE_BYTES."""
        self._matcher = matcher
        self._time = time_taken
        self.size = size

    def copy(self) -> Self:
        """Another one at the same position, for another sequence of the request."""
        return type(self)(self._matcher.deep_copy(), self._time, self.size)

    def for_request(self) -> Self:
        """Another one at the same position, for another request."""
        return type(self)(self._matcher.deep_copy(), MaskTime(self._time.step), self.size)

    def begin_step(self) -> None:
        """What guides of this model take counts for another step from now on."""
        self._time.step.seconds = 0.0

    @property
    def error(self) -> str:
        """One sentence, if the grammar became too costly to follow; else empty."""
        return _sentence(self._matcher.get_error()) or self._time.error

    def allowed(self, vocab_size: int, after: Sequence[int] = ()) -> NDArray[np.bool_]:
        """The tokens that may come next, or `after` some more, bool [vocab_size]; none after an error."""
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
        """How many of these tokens may come next, one after the other, as far as that is cheap to tell."""
        before, accepted = self._time.seconds, 0
        for most in (1, len(tokens)):  # the first tells what the others may cost
            if accepted == most or not self._time.within_limits():
                break
            with self._time.spend():
                accepted = self._matcher.validate_tokens([*tokens[:most]])
            if accepted < most or self._time.seconds - before > DEAR_SECONDS:
                break
        return accepted

    def accept(self, token_id: int) -> bool:
        """Go on past an allowed token; return whether the text is complete: nothing more may come."""
        self._go_on(self._matcher, token_id)
        self._time.tokens += 1
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _go_on(self, matcher: LLMatcher, token_id: int) -> None:
        if self._time.within_limits():  # if not, no mask allows anything after it
            with self._time.spend():
                matcher.consume_token(token_id)


class GuideCompiler:
    """Makes guides for a model. Safe to share between threads; the engine's thread must not wait for it."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer | None, *, compact: bool = True) -> None:
        """JSON is `compact`, without blanks, unless its schema says otherwise."""
        self._manifest = manifest
        self._compact = compact
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        # Tokens with a visible text that the library does not treat as text: added ones that are written like tags.
        self._tags: dict[str, int] = {}
        self._trial: GuideTrial | None = None
        self._step = StepTime()
        # Most servers see the same few schemas again and again; the oldest goes first. What cannot be compiled is kept
        # too, as its error, and each with its bytes.
        self._compiled: dict[Guided, tuple[Guide | str, int]] = {}
        self._live_bytes = 0

    def load(self) -> None:
        """Make the vocabulary now, where guides are possible: it takes a second, in which no other thread runs."""
        with suppress(FieldError):
            self._loaded()

    def end(self) -> None:
        """Compile nothing more, and end what is being tried."""
        if self._trial is not None:
            self._trial.end()

    def compile(self, guided: Guided) -> Guide:
        """The guide of a request.

        Raises:
            FieldError: the schema, expression or grammar is not valid or takes too much to compile, or the model has no
                tokenizer.
            QueueFullError: too many wait to be compiled, or those of running requests take too much memory.
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
        self._live_bytes -= size  # without the lock: the collector may call this in a thread that holds it

    def _shrink(self) -> None:
        total = sum(size for _, size in self._compiled.values())
        while len(self._compiled) > COMPILED_GUIDES or (total > COMPILED_BYTES and len(self._compiled) > 1):
            _, size = self._compiled.pop(next(iter(self._compiled)))
            total -= size

    def _compile(self, guided: Guided) -> tuple[Guide | str, int]:
        """The guide or its error in a sentence, and the guide's bytes."""
        vocabulary, trial = self._loaded()
        text = "\n".join([guided.text, *mark_rules(guided.marks, self._tags)])
        if self._compact and guided.kind == "json":
            text = compact_schema(text)
        outcome = trial.run(guided.kind, text)
        if outcome.error:
            return _sentence(outcome.error), 0
        return Guide(make_matcher(vocabulary, guided.kind, text), MaskTime(self._step), outcome.size), outcome.size

    def _loaded(self) -> tuple[LLTokenizer, GuideTrial]:
        """The vocabulary and where grammars are tried: made at first use at the latest; takes a second."""
        manifest, tokenizer = self._manifest, self._tokenizer
        ends = [token for token in manifest.tokenizer.eos_token_ids if token < manifest.vocab_size]  # as in the engine
        if tokenizer is None or not ends:
            raise FieldError("guided", f"guided needs text that can end, and {manifest.name} has no tokenizer for that")
        with self._lock:
            if self._vocabulary is None or self._trial is None:
                file = tokenizer.to_json()
                vocabulary = make_vocabulary(file, manifest.vocab_size, ends)
                for token in json.loads(file).get("added_tokens") or ():
                    token_id = token["id"]
                    if not token["special"] and token_id not in ends and vocabulary.is_special_token(token_id):
                        self._tags[token["content"]] = token_id
                self._vocabulary, self._trial = vocabulary, GuideTrial(file, manifest.vocab_size, ends)
            return self._vocabulary, self._trial


def compact_schema(text: str) -> str:
    """A JSON schema that asks for no blanks, unless it says otherwise; what is no schema as it is."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text  # the library says what is wrong
    schema = {} if schema is True else schema
    return json.dumps({LAYOUT: {"whitespace_flexible": False}, **schema}) if isinstance(schema, dict) else text


def mark_rules(marks: Sequence[str], tags: Mapping[str, int]) -> list[str]:
    """The rules of `Guided.marks`, for a vocabulary with these `tags`.

    A tag is no text to the library, so a text may have tags between its parts. A model can also spell a mark that it
    has a token for; `lazy` ends the text there, too, as it matches as soon as it can.
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
    """An error of the library in one line: what it begins with, and the detail where it marks one."""
    lines = error.strip().splitlines() or [""]
    details = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join([NO_TEXT.get(lines[0], lines[0]), *details])[:LONGEST_ERROR]
