"""Documents have the requested length and facts, and the text alone suffices to respond to every question."""

import random
import re

import pytest

from sharp.core.errors import InputError
from sharp.exporter.long_context.documents import LEAST_TOKENS, TASKS, make_document, sentences_of
from sharp.exporter.long_context.intervals import difference, ratio

WORDS = ["day", "bottle", "green", "wall", "north", "letter", "music", "because", "never", "seven", "walk", "open"]


def sentences(count: int = 3000) -> list[str]:
    chance = random.Random(0)
    text = " ".join(" ".join(chance.choices(WORDS, k=14)).capitalize() + "." for _ in range(count))
    return sentences_of(text)


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.mark.parametrize("tokens", [512, 1000, 4096, 16384])
def test_a_document_has_its_length_and_all_facts(tokens: int) -> None:
    document = make_document(sentences(), tokens, 0, count)
    assert 0.95 * tokens <= count(document.text) <= tokens
    by_task = {task: [question for question in document.questions if question.task == task] for task in TASKS}
    assert [len(by_task[task]) for task in TASKS[:3]] == [16, 15, 4]
    assert 2 <= len(by_task["copy"]) <= 8
    for question in by_task["retrieval"]:
        assert f"{question.lead}{question.expected}." in document.text
        place = document.text.index(question.lead) / len(document.text)
        assert question.depth == pytest.approx(place, abs=1e-3)
    for question in by_task["copy"]:
        assert document.text.count(question.lead) == 1 and question.lead + question.expected in document.text
    for question in document.questions:
        assert question.expected in question.choices


def test_chains_are_followed_and_animals_are_counted_in_the_text() -> None:
    document = make_document(sentences(), 2048, 3, count)
    goods = dict(re.findall(r"Box (\w+) holds (\w+)\.", document.text))
    same = dict(re.findall(r"Box (\w+) holds the same as box (\w+)\.", document.text))
    numbers = ["one", "two", "three", "four"]
    for question in document.questions:
        if question.task == "tracking":
            tree, hops = question.lead.split()[1], 0
            while tree in same:
                assert document.text.index(f"Box {same[tree]} holds") < document.text.index(f"Box {tree} holds")
                tree, hops = same[tree], hops + 1
            assert (f" {goods[tree]}", hops) == (question.expected, question.hops)
        if question.task == "counting":
            animal = re.search(r"that a (\w+) ran", question.lead)
            assert animal is not None
            assert numbers[document.text.count(f"A {animal[1]} ran past.") - 1] == question.expected.strip()


def test_documents_are_the_same_again_and_differ_by_number_and_seed() -> None:
    found = sentences()
    texts = [
        make_document(found, 1024, *which).text
        for which in ((0, count, 0), (0, count, 0), (1, count, 0), (0, count, 1))
    ]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_what_cannot_be_a_document_is_refused() -> None:
    with pytest.raises(InputError, match="needs 512 tokens"):
        make_document(sentences(), LEAST_TOKENS - 1, 0, count)
    with pytest.raises(InputError, match="too few for a document"):
        make_document(sentences(20), 4096, 0, count)


def test_intervals_are_those_of_a_binomial_where_documents_have_one_question() -> None:
    right = [1] * 60 + [0] * 40
    found = ratio(right, [1] * 100)
    assert found.value == 0.6 and found.standard_error == pytest.approx((0.6 * 0.4 / 100) ** 0.5, rel=0.05)
    assert found.low == pytest.approx(0.5, abs=0.02) and found.high == pytest.approx(0.69, abs=0.02)
    assert ratio([3], [4]).low is None and ratio([3], [4]).standard_error is None


def test_too_few_documents_have_no_interval_and_so_no_mark() -> None:
    few, enough = difference([5] * 5, [4] * 5, [16] * 5), difference([5] * 6, [4] * 6, [16] * 6)
    assert few.low is None and few.high is None and few.standard_error is not None
    assert enough.low is not None


def test_documents_that_agree_in_themselves_count_as_one_observation() -> None:
    wide, narrow = ratio([16] * 3 + [0] * 3, [16] * 6), ratio([8] * 6, [16] * 6)
    assert wide.value == narrow.value == 0.5
    assert narrow.standard_error == 0 and wide.standard_error is not None and wide.standard_error > 0.15


def test_a_difference_on_the_same_documents_is_known_better_than_its_parts() -> None:
    easy_and_hard = [2, 15, 4, 12, 8, 1, 14, 9]
    better = [score + 1 for score in easy_and_hard]
    found = difference(better, easy_and_hard, [16] * 8)
    assert found.value == pytest.approx(1 / 16) and found.low == pytest.approx(1 / 16)


def test_a_text_without_sentences_is_refused() -> None:
    with pytest.raises(InputError, match="no text to put around the facts"):
        make_document([], LEAST_TOKENS, 0, count)
