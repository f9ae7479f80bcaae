"""The native sampler agrees with its definition in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.plugins.cpu.sampling import NO_TOKEN, logprobs, sample

CLOSE = 1e-5  # float32 weights: a random number or mass within this distance of a border may fall on either side


def kept_by_definition(weights, top_k, top_p, min_p):
    """Return which tokens the limits surely keep, and which they may keep, bool [vocab] each."""
    lowest = min_p
    if 0 < top_k < len(weights):
        lowest = max(lowest, np.sort(weights)[-top_k])
        candidates = np.where(weights >= np.sort(weights)[-top_k], weights, 0)
    else:
        candidates = weights
    slack = CLOSE * lowest
    if top_p < 1:
        descending = np.sort(candidates)[::-1]
        cumulated = np.cumsum(descending)
        enough = top_p * cumulated[-1]
        first, last = np.searchsorted(cumulated, [enough * (1 - CLOSE), enough * (1 + CLOSE)])
        first, last = descending[np.minimum([first, last], len(weights) - 1)]
        return weights >= max(first, lowest + slack), weights >= max(min(last, first), lowest - slack)
    return weights >= lowest + slack, weights >= lowest - slack


def check_draw(logits, token, sharpness, top_k, top_p, min_p, random):
    """Assert that `token` is the token that the definition samples, up to rounding."""
    if not np.isfinite(logits.max()):
        assert token == NO_TOKEN
        return
    if sharpness == 0:
        assert token == logits.argmax()
        return
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - logits.max()) * np.float64(np.float32(sharpness)))
    assert weights[token] > 1e-39  # below this, float32 has no weights; up to 1e-37 a token may have a weight or none
    weights[weights < 1e-37] = 0
    surely, perhaps = kept_by_definition(weights, top_k, top_p, min_p)
    assert perhaps[token]
    least, most = np.where(surely, weights, 0), np.where(perhaps, weights, 0)
    slack = CLOSE * most.sum()
    assert least[:token].sum() - slack <= random * most.sum()
    assert random * least.sum() <= most[: token + 1].sum() + slack


LIMITS = st.tuples(
    st.sampled_from([0, 0.5, 1, 3, 1e37]),
    st.sampled_from([0, 1, 5, 40, 500, 10**6]),
    st.sampled_from([1e-6, 0.3, 0.9, 0.999999, 1]),
    st.sampled_from([0, 0.02, 0.5, 1]),
    st.floats(0, 1, exclude_max=True),
)


@given(
    st.lists(LIMITS, min_size=1, max_size=5),
    st.sampled_from([1, 3, 15, 127, 128, 129, 1000, 20000]),
    st.sampled_from(["flat", "normal", "steep", "ties", "masked", "equal"]),
    st.integers(0, 2**32 - 1),
)
def test_draws_follow_the_definition(limits, vocab, kind, seed):
    random = np.random.default_rng(seed)
    spread = {"flat": 0.3, "normal": 3, "steep": 30, "ties": 2, "masked": 3, "equal": 0}[kind]
    logits = random.normal(0, spread, (len(limits), vocab)).astype(np.float32)
    if kind == "ties":
        logits = np.rint(logits)
    if kind == "masked":
        logits[random.random(logits.shape) < 0.95] = -np.inf
    sampled = sample(logits, np.array(limits, float))
    for row, token, limit in zip(logits, sampled.tolist(), limits, strict=True):
        check_draw(row, token, *limit)
    for place, limit in enumerate(limits):  # a row does not depend on the other rows
        assert sample(logits[place : place + 1], np.array([limit], float)).tolist() == [sampled[place]]


def test_tokens_that_tie_with_the_last_that_is_kept_are_kept():
    logits = np.array([1, 2, 2, 0, 2, 3], np.float32)
    randoms = np.linspace(0, 1, 400, endpoint=False)

    def sampled(top_k, top_p):
        rows = np.array([(1, top_k, top_p, 0, random) for random in randoms])
        return set(sample(np.tile(logits, (len(rows), 1)), rows).tolist())

    assert sampled(2, 1) == sampled(4, 1) == {1, 2, 4, 5}
    assert sampled(0, 0.6) == {1, 2, 4, 5}
    assert sampled(1, 1) == sampled(0, 0.4) == {5}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 130, 299])
@pytest.mark.parametrize("sharpness", [0, 1])
def test_rows_that_are_not_finite_have_no_token(bad, place, sharpness):
    logits = np.zeros((2, 300), np.float32)
    logits[0, place] = bad
    if bad == -np.inf:
        logits[0] = bad
    logits[1, place] = 100
    sampled = sample(logits, np.array([(sharpness, 0, 1, 0, 0.5)] * 2))
    assert sampled.tolist() == [NO_TOKEN, place]
    assert np.isnan(logprobs(logits, [0, 1], [1, 1], 3)[1]).all(1).tolist() == [True, False]


@given(st.sampled_from([1, 20, 129, 5000]), st.sampled_from([0, 1, 5, 20]), st.booleans(), st.integers(0, 2**32 - 1))
def test_the_most_likely_tokens_follow_the_definition(vocab, top, ties, seed):
    logits = np.random.default_rng(seed).normal(0, 40, (3, vocab)).astype(np.float32)
    if ties:
        logits = np.rint(logits / 20)
    rows, token_ids = [2, 0], [vocab - 1, vocab // 2]
    found, values = logprobs(logits, rows, token_ids, min(top, vocab))
    expected = logits[rows] - np.log(np.exp(logits[rows].astype(np.float64)).sum(1, keepdims=True))
    assert found[:, 0].tolist() == token_ids
    assert found[:, 1:].tolist() == np.argsort(-logits[rows], axis=1, kind="stable")[:, :top].tolist()
    np.testing.assert_allclose(values, np.take_along_axis(expected, found, 1), atol=2e-5)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 70])
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_nothing(rows, threads):
    random = np.random.default_rng(rows)
    logits = random.normal(0, 3, (rows, 1000)).astype(np.float32)
    samplings = np.column_stack([random.choice([0, 1.25], rows), np.full((rows, 3), [0, 0.9, 0]), random.random(rows)])
    assert sample(logits, samplings, threads=threads).tolist() == sample(logits, samplings).tolist()
