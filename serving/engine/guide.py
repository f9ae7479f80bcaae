"""`Guide`: which tokens may come next where the text must match a schema, an expression or a grammar."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import Guided
from sharp.serving.text.tokenizer import Tokenizer

LONGEST_ERROR = 300
COMPILED_GUIDES = 64
# Compiling and a token's mask cost at most some tens of milliseconds each; whatever needs more is an error.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
GRAMMARS: dict[str, Callable[[str], str]] = {
    "json": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "grammar": LLMatcher.grammar_from_lark,
}


class Guide:
    """Follows one sequence; only the engine's thread uses it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Self:
        """Another one at the same position."""
        return type(self)(self._matcher.deep_copy())

    @property
    def error(self) -> str:
        """One sentence, if the grammar became too costly to follow; else empty."""
        return _sentence(self._matcher.get_error())

    def allowed(self, vocab_size: int, after: Sequence[int] = ()) -> NDArray[np.bool_]:
        """The tokens that may come next, or `after` some more, bool [vocab_size]; none after an error."""
        bits = np.zeros(-(-vocab_size // 32), np.int32)
        matcher = self._matcher
        if after:
            matcher = matcher.deep_copy()
            matcher.consume_tokens(list(after))
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            return np.zeros(vocab_size, np.bool_)
        return np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        return self._matcher.validate_tokens(list(tokens))

    def accept(self, token_id: int) -> bool:
        """Go on past an allowed token; return whether the text is complete: nothing more may come."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped() and not self._matcher.is_error()


class GuideCompiler:
    """Makes guides for a model. Safe to share between threads; the engine's thread must not wait for it."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer | None) -> None:
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        # Tokens with a visible text that the library does not treat as text: added ones that are written like tags.
        self._tags: dict[str, int] = {}
        # Most servers see the same few schemas again and again; the oldest goes first.
        self._compiled: dict[Guided, Guide] = {}

    def compile(self, guided: Guided) -> Guide:
        """The guide of a request.

        Raises:
            FieldError: the schema, expression or grammar is not valid or too large, or the model has no tokenizer.
        """
        with self._lock:
            if guided in self._compiled:
                return self._compiled[guided].copy()
        guide = self._compile(guided)
        with self._lock:
            self._compiled[guided] = guide.copy()
            if len(self._compiled) > COMPILED_GUIDES:
                del self._compiled[next(iter(self._compiled))]
        return guide

    def _compile(self, guided: Guided) -> Guide:
        name = f"guided.{guided.kind}"
        vocabulary = self._loaded()
        text = "\n".join([guided.text, *mark_rules(guided.marks, self._tags)])
        try:
            matcher = LLMatcher(vocabulary, GRAMMARS[guided.kind](text), log_level=0, limits=LIMITS)
        except ValueError as error:  # text that is no JSON
            raise FieldError(name, f"{name} cannot be used: {_sentence(str(error))}") from error
        guide = Guide(matcher)
        # The first mask can take much longer than later ones: it is better computed here than in a step.
        if not guide.error:
            guide.allowed(self._manifest.vocab_size)
        if guide.error:
            raise FieldError(name, f"{name} cannot be used: {guide.error}")
        return guide

    def _loaded(self) -> LLTokenizer:
        """The vocabulary as the library wants it: made at first use, as few servers need it and it takes a second."""
        manifest, tokenizer = self._manifest, self._tokenizer
        if tokenizer is None or not manifest.tokenizer.eos_token_ids:
            raise FieldError("guided", f"guided needs text that can end, and {manifest.name} has no tokenizer for that")
        with self._lock:
            if self._vocabulary is None:
                file, ends = tokenizer.to_json(), manifest.tokenizer.eos_token_ids
                vocabulary = LLTokenizer(file, n_vocab=manifest.vocab_size, eos_token=list(ends))
                for token in json.loads(file).get("added_tokens") or ():
                    token_id = token["id"]
                    if not token["special"] and token_id not in ends and vocabulary.is_special_token(token_id):
                        self._tags[token["content"]] = token_id
                self._vocabulary = vocabulary
            return self._vocabulary


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
    return " ".join([lines[0], *details])[:LONGEST_ERROR]
