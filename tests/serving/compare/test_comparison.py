"""Differences between two readings of a model, and the verdict that names them."""

import math
from dataclasses import replace

import pytest

from sharp.serving.compare.comparison import (
    Comparison,
    Ends,
    TextComparison,
    compare_stops,
    compare_text,
    divergence,
    first_difference,
)
from sharp.serving.compare.reading import Reading, ReadingTask, StopTokens
from sharp.serving.compare.server_reader import ServerReader
from sharp.serving.compare.tolerance import Tolerance, tolerance_of
from sharp.serving.compare.verdict import not_compared, verdict

PROMPT = ReadingTask("abc", (1, 2, 3), 3)
HERE = Reading(
    [{2: -0.1, 5: -2.5}, {3: -1.0, 6: -0.5}], (7, 8, 9), [{7: -0.1, 4: -3.0}, {8: -0.7, 4: -0.71}, {9: -0.1}]
)
LIMIT = Tolerance(0.001)
NONE = Ends(frozenset(), frozenset())


def compared(there, tokens=PROMPT.token_ids, stops=NONE, here=HERE):
    return compare_text("a", PROMPT, tokens, here, there, tolerance=LIMIT, stops=stops, text_of=lambda one: f"<{one}>")


def whole(text, stops=None):
    return Comparison("folder", "other", LIMIT, (text,), *compare_stops(frozenset({9}), stops))


def test_the_same_agrees():
    found = compared(HERE)
    assert (found.differences, found.generated, found.tokens, found.continuation) == ((0.0,) * 5, 3, None, None)
    assert found.divergences == (0.0,) * 5
    assert whole(found).agrees
    assert verdict(whole(found)).startswith("agrees: the same 3 tokens of 1 text, 5 log-probabilities within 0 nats")


def test_the_likeliest_token_is_compared_where_the_one_that_stands_there_is_the_same():
    found = compared(replace(HERE, prompt=[HERE.prompt[0], {3: -1.0, 6: -1.5}]))
    assert found.differences[:2] == (0.0, 1.0)
    assert (found.first.position, found.first.token, found.first.size) == (2, 6, 1.0)
    assert "with one token of context they agree" in verdict(whole(found))


def test_a_token_that_the_other_does_not_list_is_at_most_as_likely_as_its_last():
    found = compared(replace(HERE, prompt=[{2: -0.1, 5: -2.5}, {3: -1.0, 7: -0.4, 8: -2.0}]))
    assert found.first.position == 2
    assert found.first.size == pytest.approx(1.5)  # 1.5 for token 6, whose log-probability there is at most -2


def test_a_list_of_one_token_says_nothing_of_the_others():
    assert compared(replace(HERE, prompt=[{2: -0.1}, {3: -1.0}])).differences[:2] == (0.0, 0.0)


def test_a_tie_of_generated_tokens_is_no_difference():
    near = [HERE.generated[0], {8: -0.7, 4: -0.704}, {9: -0.1}]
    here = replace(HERE, generated=near)
    found = compared(replace(here, tokens=(7, 4, 1)), here=here)
    assert (found.continuation, found.generated, found.ties) == (None, 1, True)
    found = compared(replace(HERE, tokens=(4, 8, 9)))
    assert (found.continuation.position, found.continuation.here, found.continuation.there) == (0, 7, 4)


def test_generated_tokens_are_compared_by_their_log_probabilities_too():
    there = replace(HERE, prompt=None, generated=[{7: -0.1, 4: -3.0}, {8: -0.9, 4: -0.95}, {9: -0.1}])
    found = compared(there)
    assert found.differences == pytest.approx((0.0, 0.2, 0.0))
    assert (found.first.position, found.first.token) == (4, 8)
    # behind the token that differs, the programs read different texts
    later = compared(replace(there, tokens=(7, 5, 9)))
    assert len(later.differences) == 2


@pytest.mark.parametrize("tokens", [(7, 8, 9), (7, 8)])
def test_a_stop_token_may_be_shown_or_not(tokens):
    ends = Ends(frozenset({9}), frozenset({9}))
    assert compared(replace(HERE, tokens=tokens), stops=ends).continuation is None


def test_a_program_that_goes_on_past_a_stop_token_differs():
    here = replace(HERE, tokens=(7, 8), generated=HERE.generated[:2])
    ends = Ends(frozenset({8}), frozenset())
    found = compared(replace(HERE, tokens=(7, 8, 9)), stops=ends, here=here)
    assert (found.continuation.position, found.continuation.here, found.continuation.there) == (1, None, 8)


def test_stop_tokens():
    declared = frozenset({9})
    assert compare_stops(declared, StopTokens(frozenset({9}), frozenset({9, 5})))[1:] == ((), ())
    assert compare_stops(declared, StopTokens(frozenset({9, 5}), frozenset({9, 5})))[1:] == ((5,), ())
    assert compare_stops(declared, StopTokens(frozenset({5}), frozenset({5})))[1:] == ((5,), (9,))
    found = whole(compared(HERE), StopTokens(frozenset({5}), frozenset({5})))
    assert "5 ends a completion there and not here and 9 ends a completion here and not there" in verdict(found)


def test_texts_are_compared_where_a_server_gives_no_ids():
    there = Reading(
        [{"<2>": -0.1, "<5>": -2.5}, {"<3>": -1.0, "<6>": -0.5}],
        ("<7>", "<8>", "<9>"),
        by_text=True,
        read=("<1>", "<2>", "<3>"),
    )
    found = compared(there, None)
    assert (found.differences, found.generated, found.tokens_compared, found.tokens) == ((0.0, 0.0), 3, True, None)
    found = compared(replace(there, read=("<1>", "x", "<3>")), None)
    assert (found.tokens.position, found.tokens.here, found.tokens.there) == (1, "<2>", "x")
    assert found.differences == ()  # no log-probabilities are compared, because they belong to different tokens
    # U+FFFD is a part of a character
    assert compared(replace(there, read=("<1>", "\ufffd", "<3>")), None).tokens is None


def test_the_divergence_is_that_of_all_tokens_or_less():
    here, there = {1: math.log(0.5), 2: math.log(0.3)}, {1: math.log(0.25), 2: math.log(0.6)}
    expected = 0.25 * math.log(0.25 / 0.5) + 0.6 * math.log(0.6 / 0.3) + 0.15 * math.log(0.15 / 0.2)
    assert divergence(here, there) == pytest.approx(expected)
    assert divergence({1: -0.1}, {2: -0.1}) == 0.0  # no token is in both lists


@pytest.mark.parametrize(
    ("here", "there", "expected"), [((1, 2), (1, 2), None), ((1, 2), (1,), (1, 2, None)), ((), (4,), (0, None, 4))]
)
def test_the_first_difference(here, there, expected):
    found = first_difference(here, there)
    assert (found and (found.position, found.here, found.there)) == expected


def test_what_could_not_be_compared_is_said():
    found = whole(TextComparison("a", 3, lacks=("log-probabilities of the prompt",)))
    assert not found.something
    assert [line.partition(":")[0] for line in not_compared(found)] == [
        "the tokens of 'a'",
        "log-probabilities of 'a'",
        "stop tokens",
    ]


def test_the_tolerance_is_that_of_the_lower_precision():
    assert (tolerance_of("float32", "float32").mean, tolerance_of("4 bits", "float32").precision) == (0.001, "4 bits")
    assert tolerance_of("16 bits", "8 bits").largest == pytest.approx(3.0)


def test_of_many_stop_tokens_those_that_were_not_tried_are_no_difference(monkeypatch):
    reader = ServerReader.__new__(ServerReader)
    monkeypatch.setattr(reader, "_ends_at", lambda token: token != 3, raising=False)
    declared = frozenset(range(20))
    assert compare_stops(declared, reader.stops(declared))[1:] == ((), (3,))
