"""`Comparison`: where the results of two programs for the same texts differ, and by how much."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest

from sharp.serving.compare.formats import ambiguous
from sharp.serving.compare.reading import Distribution, Reading, ReadingTask, StopTokens, Token
from sharp.serving.compare.tolerance import Tolerance

LEAST = -30.0  # nats; a lower log-probability is only rounding of the softmax


@dataclass(frozen=True)
class TokenDifference:
    """The first token of a text that differs; None if one list of tokens has ended."""

    position: int
    here: Token | None
    there: Token | None


@dataclass(frozen=True)
class LogprobDifference:
    """The log-probabilities of a token at a position of a text in both programs."""

    position: int
    token: Token
    here: float
    there: float

    @property
    def size(self) -> float:
        """The absolute difference in nats."""
        return abs(self.here - self.there)


@dataclass(frozen=True)
class Ends:
    """The tokens that end a completion in each of the two programs, as far as they are known."""

    here: frozenset[Token]
    there: frozenset[Token]


@dataclass(frozen=True)
class TextComparison:
    """The comparison of one text.

    Attributes:
        name: the name of the text.
        count: the number of tokens of the text in the model folder.
        tokens_compared: the other program tells its tokens of the text.
        tokens: the first token that differs.
        differences: absolute differences of log-probabilities in nats, one per compared position: the largest among the
            token of the text and the likeliest token of either program.
        divergences: KL divergence of the other program's distribution p from the folder's q at these positions, the sum
            of p ln(p / q), in nats; a lower bound, because tokens that only one of the two lists shows are counted as
            one.
        first: the first log-probability whose difference is beyond the limit.
        largest: the log-probability that differs most.
        continuation: the first generated token that differs beyond a tie.
        generated: the number of generated tokens that are the same.
        ties: the other program chose a token that is as likely in the folder, within the tolerance.
        lacks: what the other program did not give.
    """

    name: str
    count: int
    tokens_compared: bool = False
    tokens: TokenDifference | None = None
    differences: tuple[float, ...] = ()
    divergences: tuple[float, ...] = ()
    first: LogprobDifference | None = None
    largest: LogprobDifference | None = None
    continuation: TokenDifference | None = None
    generated: int = 0
    ties: bool = False
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The comparison of all texts and of the stop tokens.

    Attributes:
        folder: the name of the model folder.
        other: the name of the other program.
        tolerance: the allowed differences of log-probabilities.
        texts: the comparison of each text.
        stops: the folder's stop tokens and the other program's; None if the other program does not tell them.
        missing: stop tokens that the other program's files declare and the folder lacks.
        extra: stop tokens of the folder at which the other program goes on.
    """

    folder: str
    other: str
    tolerance: Tolerance
    texts: tuple[TextComparison, ...]
    stops: tuple[frozenset[int], StopTokens] | None = None
    missing: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()

    @property
    def differences(self) -> list[float]:
        """The absolute differences of all log-probabilities, in nats."""
        return [difference for text in self.texts for difference in text.differences]

    @property
    def mean(self) -> float | None:
        """The mean of the absolute differences; None if there are none."""
        return statistics.fmean(self.differences) if self.differences else None

    @property
    def largest(self) -> float | None:
        """The largest absolute difference; None if there are none."""
        return max(self.differences, default=None)

    @property
    def divergence(self) -> float | None:
        """The mean KL divergence; None if there is none."""
        found = [value for text in self.texts for value in text.divergences]
        return statistics.fmean(found) if found else None

    @property
    def generated(self) -> int:
        """The number of generated tokens that are the same."""
        return sum(text.generated for text in self.texts)

    @property
    def something(self) -> bool:
        """Whether at least one text's tokens, log-probabilities or continuation could be compared at all."""
        return any(text.tokens_compared or text.differences or text.generated or text.ties for text in self.texts) or (
            any(text.continuation is not None for text in self.texts)
        )

    @property
    def wide(self) -> bool:
        """Whether the mean difference is beyond the tolerance, or a single difference beyond its limit."""
        return any(text.first is not None for text in self.texts) or (self.mean or 0.0) > self.tolerance.mean

    @property
    def agrees(self) -> bool:
        """Whether tokens, log-probabilities, continuations and stop tokens agree within the tolerance."""
        return not (
            self.wide
            or self.missing
            or self.extra
            or any(text.tokens is not None or text.continuation is not None for text in self.texts)
        )


def compare_stops(
    declared: frozenset[int], other: StopTokens | None
) -> tuple[tuple[frozenset[int], StopTokens] | None, tuple[int, ...], tuple[int, ...]]:
    """Return both programs' stop tokens, those that the folder lacks, and those at which the other program goes on.

    `declared` are the folder's stop tokens. If `other` is None, the first value is None and the other two are empty.
    """
    if other is None:
        return None, (), ()
    return (declared, other), tuple(sorted(other.declared - declared)), tuple(sorted(declared - other.allowed))


def compare_text(
    name: str,
    prompt: ReadingTask,
    tokens: Sequence[int] | None,
    here: Reading,
    there: Reading,
    *,
    tolerance: Tolerance,
    stops: Ends,
    text_of: Callable[[int], str],
) -> TextComparison:
    """Compare one text.

    Args:
        name: the name of the text.
        prompt: the text, with its tokens in the folder's tokenizer.
        tokens: the other program's tokens of the text; None if it does not tell them.
        here: the folder's reading.
        there: the other program's reading.
        tolerance: the allowed differences.
        stops: the tokens that end a completion in each program.
        text_of: returns the text of a token id, for programs that show no ids.
    """
    names: Sequence[Token] = prompt.token_ids
    if there.by_text:
        here, names = _by_text(here, text_of), [text_of(token) for token in prompt.token_ids]
        stops = Ends(*(frozenset(text_of(int(token)) for token in ends) for ends in (stops.here, stops.there)))
    said = (there.read or None) if tokens is None else tokens
    different = None if said is None else first_difference(names if tokens is None else prompt.token_ids, said)
    found = TextComparison(name, len(names), said is not None, different, lacks=there.lacks)
    if different is not None and there.read is not None:  # the log-probabilities are of other tokens
        return found
    continuation, generated, ties = _continuation(here, there, tolerance, stops)
    # The two programs may spell the text of a token differently, so a text that one list lacks need not be unlikely.
    bounded = not there.by_text
    compared = list(_compared(here.prompt or (), there.prompt or (), names[1:], 1, bounded=bounded))
    # The position where the two continuations part has the same tokens before it in both, so it is compared, too.
    same = slice(generated + (ties or continuation is not None))
    own = here.tokens or ()
    compared += _compared(here.generated[same], there.generated[same], own, len(names), bounded=bounded)
    return replace(
        found,
        differences=tuple(difference.size for difference, _ in compared),
        divergences=tuple(divergence for _, divergence in compared),
        first=next((difference for difference, _ in compared if difference.size > tolerance.largest), None),
        largest=max((difference for difference, _ in compared), key=lambda entry: entry.size, default=None),
        continuation=continuation,
        generated=generated,
        ties=ties,
    )


def first_difference(here: Sequence[Token], there: Sequence[Token]) -> TokenDifference | None:
    """Return the first position where two lists of tokens differ, or None. Ambiguous texts count as equal to all."""
    for position, (first, second) in enumerate(zip_longest(here, there)):
        if first != second and not any(isinstance(token, str) and ambiguous(token) for token in (first, second)):
            return TokenDifference(position, first, second)
    return None


def divergence(here: Distribution, there: Distribution) -> float:
    """Return the KL divergence of `there` from `here` in nats: the sum of p ln(p / q).

    The probabilities p are those of `there`, and q those of `here`. Tokens that are not in both count as one token.
    """
    shared = here.keys() & there.keys()
    pairs = [(math.exp(there[token]), math.exp(here[token])) for token in shared]
    rest = tuple(max(1.0 - math.fsum(column), 0.0) for column in (zip(*pairs, strict=True) if pairs else ((), ())))
    least = math.exp(LEAST)
    return max(math.fsum(p * math.log(max(p, least) / max(q, least)) for p, q in (*pairs, rest)), 0.0)


def _compared(
    here: Sequence[Distribution | None],
    there: Sequence[Distribution | None],
    tokens: Sequence[Token],
    start: int,
    *,
    bounded: bool,
) -> Iterator[tuple[LogprobDifference, float]]:
    """Yield the difference and the divergence of each position for which both programs have a distribution.

    `start` is the position of the first of `tokens`. If `bounded`, a token that one program does not show counts as at
    most as likely as the tokens that it shows.
    """
    for position, (first, second, token) in enumerate(zip(here, there, tokens, strict=False), start):
        if first and second and (found := _difference(first, second, token, position, bounded)) is not None:
            yield found, divergence(first, second)


def _difference(
    here: Distribution, there: Distribution, token: Token, position: int, bounded: bool
) -> LogprobDifference | None:
    """Return the largest difference among the token of the text and the likeliest token of either program.

    The likeliest tokens are included, because the token of the text may be unlikely in both programs where everything
    else differs. If `bounded`, a token that one program does not show counts as at most as likely as the tokens that it
    shows. Return None if nothing is comparable.
    """
    found = []
    for candidate in dict.fromkeys((token, max(here, key=here.__getitem__), max(there, key=there.__getitem__))):
        first, second = here.get(candidate), there.get(candidate)
        most = _most(here if first is None else there, token) if bounded else None
        if most is not None and first is None and second is not None:
            first = min(second, most)
        elif most is not None and second is None and first is not None:
            second = min(first, most)
        if first is not None and second is not None:
            found.append(LogprobDifference(position, candidate, max(first, LEAST), max(second, LEAST)))
    return max(found, key=lambda difference: difference.size, default=None)


def _most(likeliest: Distribution, token: Token) -> float | None:
    """Return the upper bound of the log-probability of tokens that are not in `likeliest`; None if there is none.

    `token` is ignored, because the token of the text is listed even if it is unlikely.
    """
    return min((logprob for other, logprob in likeliest.items() if other != token), default=None)


def _continuation(
    here: Reading, there: Reading, tolerance: Tolerance, stops: Ends
) -> tuple[TokenDifference | None, int, bool]:
    """Return the first generated token that differs, the number of equal tokens before it, and whether it is a tie.

    In a tie, the other program's token is as likely in the folder as the folder's own, within the tolerance, and the
    first value is None. If the other program gave no tokens, nothing is compared, and the values are None, 0 and False.
    Tokens that end a completion are not compared.
    """
    if there.tokens is None:
        return None, 0, False
    own, others = list(here.tokens or ()), list(there.tokens)
    first = list(takewhile(lambda token: token not in stops.here | stops.there, own))
    second = list(takewhile(lambda token: token not in stops.there, others))
    if second and len(second) == len(others) and second[-1] in stops.here:
        second.pop()  # the program ended at this token; some programs show the last token and others do not
    found = first_difference(first, second)
    if found is None:
        return None, min(len(first), len(second)), False
    position = found.position
    if position < min(len(own), len(others), len(here.generated)):
        likely, one, other = here.generated[position], own[position], others[position]
        if one != other and one in likely and other in likely:
            tie = abs(likely[one] - likely[other]) <= tolerance.tie
            return None if tie else found, position, tie
    return found, position, False


def _by_text(reading: Reading, text_of: Callable[[int], str]) -> Reading:
    """Return a reading with the texts of its tokens in place of ids; `text_of` returns the text of an id."""

    def named(distribution: Distribution | None) -> Distribution | None:
        """Return a distribution over ids as one over their texts; the likeliest token of a text counts.

        None stays None.
        """
        if distribution is None:
            return None
        texts: dict[Token, float] = {}
        for token, logprob in sorted(distribution.items(), key=lambda pair: -pair[1]):
            # Several tokens can have the same text; the likeliest counts.
            texts.setdefault(text_of(int(token)), logprob)
        return texts

    return Reading(
        None if reading.prompt is None else [named(row) for row in reading.prompt],
        None if reading.tokens is None else [text_of(int(token)) for token in reading.tokens],
        [named(row) or {} for row in reading.generated],
        by_text=True,
    )
