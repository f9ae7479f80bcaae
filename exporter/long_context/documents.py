"""Documents of natural text with facts in them, and questions about these facts.

The tasks are small forms of those of RULER (Hsieh et al. 2024): retrieval of many keys, variable tracking and
counting; and copying, which needs no fact. A document has the facts of all tasks, whichever tasks are chosen, so one
cached prefix serves all questions.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sharp.core.errors import InputError

TASKS = ("retrieval", "tracking", "counting", "copy")
CITIES = (
    "Oslo",
    "Lima",
    "Cairo",
    "Tokyo",
    "Paris",
    "Delhi",
    "Miami",
    "Berlin",
    "Madrid",
    "Dublin",
    "Vienna",
    "Boston",
    "Sydney",
    "London",
    "Athens",
    "Moscow",
)
WORDS = (
    "apple",
    "river",
    "table",
    "music",
    "winter",
    "silver",
    "garden",
    "doctor",
    "bridge",
    "yellow",
    "forest",
    "camera",
    "window",
    "summer",
    "engine",
    "butter",
)
TREES = (
    "Maple",
    "Birch",
    "Cedar",
    "Willow",
    "Walnut",
    "Cherry",
    "Poplar",
    "Chestnut",
    "Spruce",
    "Hazel",
    "Olive",
    "Linden",
    "Laurel",
    "Beech",
    "Fir",
)
GOODS = ("copper", "cotton", "sugar", "paper", "leather")
ANIMALS = ("fox", "horse", "rabbit", "goose")
COUNTS = ("one", "two", "three", "four")
HOPS = 3  # boxes in a chain of the task tracking
COPIES = 8
COPY_WORDS, COPIED_WORDS = 6, 3  # words of a sentence that are shown, and that must be copied
FEWEST_PIECES = 2  # fewest sentences of natural text in a document
LEAST_TOKENS = 512


@dataclass(frozen=True)
class Question:
    """A question about a document.

    The response begins with `lead` and is right if it continues with `expected`. `choices`, which include `expected`,
    are the continuations whose probabilities are compared; each begins with a space. `task` is one of `TASKS`. `depth`
    is the share of the document before the fact, from 0 to 1. `hops` (of task tracking) is the number of earlier facts
    that must be followed.
    """

    task: str
    question: str
    lead: str
    expected: str
    choices: tuple[str, ...]
    depth: float
    hops: int = 0


@dataclass(frozen=True)
class LongDocument:
    """A text, and questions about the text, in the order of `TASKS`."""

    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class _Fact:
    sentence: str
    questions: tuple[Question, ...] = ()
    chain: int | None = None  # facts of a chain keep their order


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences and lines, with single spaces inside; none is empty."""
    parts = re.split(r"(?<=[.!?:;])\s+|\s*\n\s*", text)
    return [" ".join(part.split()) for part in parts if part and not part.isspace()]


def make_document(
    sentences: Sequence[str], tokens: int, number: int, count: Callable[[str], int], seed: int = 0
) -> LongDocument:
    """Make document `number` with 95 to 100 % of `tokens` tokens, as `count` counts them.

    `sentences` (of `sentences_of`) are the natural text around the facts; `count` returns the number of
    tokens of a text. Equal arguments give equal documents, so models with the same tokenizer read the same documents.
    A document may have less than 95 % if the search for its size ends early, but never more than `tokens`.

    Raises:
        InputError: `tokens` is below `LEAST_TOKENS` (512), there are no sentences, or no document of this size can be
            made of them.
    """
    if not sentences:
        raise InputError("--text has no text to put around the facts; give a longer one")
    if tokens < LEAST_TOKENS:
        raise InputError(f"--lengths has {tokens}, but a document needs {LEAST_TOKENS} tokens for its facts")
    chance = random.Random(f"{seed} {tokens} {number}")  # noqa: S311 - no secret
    facts = _facts(chance)
    length = sum(len(fact.sentence) + 1 for fact in facts)
    total = sum(map(len, sentences)) + len(sentences)
    start = chance.randrange(len(sentences))
    places = chance.random  # sampled once, so facts keep their depths while the amount of text is searched
    depths = [places() for _ in facts]
    copies = chance.getrandbits(64)
    in_facts = count(" ".join(fact.sentence for fact in facts))
    ratio = count(" ".join(sentences[start : start + 200])) / max(1, len(" ".join(sentences[start : start + 200])))
    budget = (tokens - in_facts) / max(ratio, 1e-3)
    for _ in range(8):
        if budget > total:
            raise InputError(
                f"the text has {total:,} characters, too few for a document of {tokens} tokens; give more with --text"
            )
        document = _assemble(_cut(sentences, start, budget), facts, depths, copies)
        found = count(document.text)
        if 0.95 * tokens <= found <= tokens:
            return document
        natural = max(1, len(document.text) - length)
        share = (0.98 * tokens - in_facts) / max(1, found - in_facts)
        budget = natural * min(4.0, max(0.2, share))
    if found > tokens:
        raise InputError(f"no document of {tokens} tokens can be made of the text; choose longer ones with --lengths")
    return document


def _cut(sentences: Sequence[str], start: int, characters: float) -> list[str]:
    """Return sentences of about `characters` characters from index `start` on, the first following the last.

    There are at least `FEWEST_PIECES`; after these, the last sentence is cut at a word to fit.
    """
    found: list[str] = []
    size = 0
    index = start
    while size < characters or len(found) < FEWEST_PIECES:
        sentence = sentences[index % len(sentences)]
        room = int(characters - size)
        if len(sentence) > room and len(found) >= FEWEST_PIECES:
            sentence = sentence[:room].rpartition(" ")[0]
            if sentence:
                found.append(sentence)
            break
        found.append(sentence)
        size += len(sentence) + 1
        index += 1
    return found


def _facts(chance: random.Random) -> list[_Fact]:
    """Return all facts with their questions, in random order."""
    words = chance.sample(WORDS, len(WORDS))
    facts = [
        _Fact(
            f"The special word for {city} is {word}.",
            (
                Question(
                    "retrieval",
                    f"What is the special word for {city}?",
                    f"The special word for {city} is",
                    f" {word}",
                    _choices(WORDS),
                    0.0,
                ),
            ),
        )
        for city, word in zip(CITIES, words, strict=True)
    ]
    trees = chance.sample(TREES, len(TREES))
    for chain, good in enumerate(GOODS):
        own = trees[chain * HOPS : (chain + 1) * HOPS]
        for hop, tree in enumerate(own):
            sentence = f"Box {tree} holds {good}." if hop == 0 else f"Box {tree} holds the same as box {own[hop - 1]}."
            lead = f"Box {tree} holds"
            question = Question(
                "tracking", f"Which good does box {tree} hold?", lead, f" {good}", _choices(GOODS), 0.0, hop
            )
            facts.append(_Fact(sentence, (question,), chain))
    for animal, number in zip(ANIMALS, chance.sample(range(len(COUNTS)), len(COUNTS)), strict=True):
        question = Question(
            "counting",
            f"How many times did a {animal} run past?",
            f"The number of times that a {animal} ran past is",
            f" {COUNTS[number]}",
            _choices(COUNTS),
            0.0,
        )
        sentence = f"A {animal} ran past."
        facts += [_Fact(sentence)] * number + [_Fact(sentence, (question,))]
    return facts


def _choices(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words as choices of a question, each after a space."""
    return tuple(f" {word}" for word in words)


def _assemble(pieces: list[str], facts: list[_Fact], depths: list[float], copies: int) -> LongDocument:
    """Join the pieces of natural text and the facts between them to a document, whose questions get their depths.

    `depths` (0 to 1) are the places of the facts, `copies` is the random seed of the questions of task copy.
    """
    ordered = _places(facts, depths)
    at: dict[int, list[_Fact]] = {}
    for depth, fact in ordered:
        at.setdefault(round(depth * len(pieces)), []).append(fact)
    written: list[str] = []
    size = 0
    asked: list[tuple[int, Question]] = []
    for index in range(len(pieces) + 1):
        for fact in at.get(index, []):
            asked += [(size, question) for question in fact.questions]
            written.append(fact.sentence)
            size += len(fact.sentence) + 1
        if index < len(pieces):
            written.append(pieces[index])
            size += len(pieces[index]) + 1
    text = " ".join(written)
    asked += _copy_questions(pieces, text, random.Random(copies))  # noqa: S311 - no secret
    questions = [
        Question(
            question.task,
            question.question,
            question.lead,
            question.expected,
            question.choices,
            round(place / max(1, len(text)), 4),
            question.hops,
        )
        for place, question in asked
    ]
    return LongDocument(text, tuple(sorted(questions, key=lambda one: TASKS.index(one.task))))


def _places(facts: list[_Fact], depths: list[float]) -> list[tuple[float, _Fact]]:
    """Return every fact with its depth, in the order of the text; facts of a chain keep their own order."""
    of_chain: dict[int, list[float]] = {}
    for fact, depth in zip(facts, depths, strict=True):
        if fact.chain is not None:
            of_chain.setdefault(fact.chain, []).append(depth)
    remaining = {chain: iter(sorted(found)) for chain, found in of_chain.items()}
    placed = [
        (depth if fact.chain is None else next(remaining[fact.chain]), number, fact)
        for number, (fact, depth) in enumerate(zip(facts, depths, strict=True))
    ]
    return [(depth, fact) for depth, _, fact in sorted(placed, key=lambda one: one[:2])]


def can_be_copied(sentences: Sequence[str]) -> bool:
    """Whether `sentences` (of `sentences_of`) suffice for the task copy.

    Some must have at least nine words, with at least two different words of three letters or more in seventh place.
    """
    words = (sentence.split(" ") for sentence in sentences)
    asked = {
        sentence[COPY_WORDS].lower()
        for sentence in words
        if len(sentence) >= COPY_WORDS + COPIED_WORDS and _is_asked(sentence)
    }
    return len(asked) > 1


def _is_asked(words: Sequence[str]) -> bool:
    """Whether a copying question can ask for the word that follows the first `COPY_WORDS` words."""
    return words[COPY_WORDS].isalpha() and len(words[COPY_WORDS]) > 2


def _copy_questions(pieces: list[str], text: str, chance: random.Random) -> list[tuple[int, Question]]:
    """Return up to 8 pairs (place in characters, question) for the next words of sentences of the text.

    The first words of such a sentence occur only once in the text. The list is empty if fewer than two fit. `pieces`
    are the sentences of the text.
    """
    found: list[tuple[int, str, str]] = []
    for piece in chance.sample(pieces, len(pieces)):
        words = piece.split(" ")
        if len(words) < COPY_WORDS + COPIED_WORDS:
            continue
        lead, expected = " ".join(words[:COPY_WORDS]), " " + " ".join(words[COPY_WORDS : COPY_WORDS + COPIED_WORDS])
        first = words[COPY_WORDS]
        distinct = all(first.lower() != other[2].split()[0].lower() for other in found)
        if text.count(lead) == 1 and _is_asked(words) and distinct:
            found.append((text.index(lead), lead, expected))
        if len(found) == COPIES:
            break
    choices = tuple(pair[2] for pair in found)
    return [
        (place, Question("copy", "How does this sentence of the text go on?", lead, expected, choices, 0.0))
        for place, lead, expected in found
        if len(choices) > 1
    ]
