from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.plugins.cpu.sampling import NO_TOKEN
from sharp.serving import SamplingParams
from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import Guided
from sharp.serving.engine.block_manager import BlockHashes
from sharp.serving.engine.logprobs import token_logprobs
from sharp.serving.engine.sampler import SamplingRow, StepSampling, apply, sample
from sharp.serving.engine.sequence import Sequence
from sharp.serving.text.stop_condition import StopCondition
from tests.serving.running_engine import prepared

LOGITS = np.log(np.array([0.4, 0.05, 0.3, 0.2, 0.05], np.float32))
DRAWS = 4000


def sequence(prompt=(0,), eos=(), **params):
    """Return a sequence that is about to get its first token."""
    request = prepared("a", prompt, SamplingParams(**params), 100)
    stop = StopCondition(request.params, None, eos, request.prompt_ids[-1])
    return Sequence(request, 0, 0, BlockHashes(b"", 4), stop)


def shares(**params) -> np.ndarray:
    """Return the share of draws in which each token is sampled."""
    rows = [SamplingRow(sequence(seed=seed, **params)) for seed in range(DRAWS)]
    sampled = sample(np.tile(LOGITS, (DRAWS, 1)), StepSampling.of(rows))
    return np.bincount(sampled, minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.05, 0.3, 0.2, 0.05]),
        ({"temperature": 0.5}, np.array([0.16, 0.0025, 0.09, 0.04, 0.0025]) / 0.295),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_p": 0.6}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9, 0]),
        # after top-k, the first token has 0.4 of 0.9, which is less than top_p
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"top_k": 100}, [0.4, 0.05, 0.3, 0.2, 0.05]),
        ({"temperature": 1e-300}, [1, 0, 0, 0, 0]),
        ({"min_p": 0.4}, [4 / 9, 0, 3 / 9, 2 / 9, 0]),
        ({"min_p": 1}, [1, 0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.9}, [1, 0, 0, 0, 0]),
        ({"logit_bias": {0: -100}}, [0, 0.05 / 0.6, 0.3 / 0.6, 0.2 / 0.6, 0.05 / 0.6]),
    ],
)
def test_distribution(params, expected):
    # The tolerance is five standard deviations of a share of 4000 draws.
    found = shares(**params)
    np.testing.assert_allclose(found, expected, atol=5 * 0.5 / DRAWS**0.5)
    assert (found[np.array(expected) == 0] == 0).all()


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.3, 1, 2]),
        "top_k": st.sampled_from([0, 1, 3, 40]),
        "top_p": st.sampled_from([0.2, 0.9, 1]),
        "min_p": st.sampled_from([0, 0.1]),
        "repetition_penalty": st.sampled_from([1, 1.5]),
        "presence_penalty": st.sampled_from([0, 0.5]),
        "frequency_penalty": st.sampled_from([0, -0.5]),
        "logit_bias": st.sampled_from([{}, {3: 2.5, 7: -1}]),
        "min_tokens": st.sampled_from([0, 2]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@given(st.lists(PARAMS, min_size=1, max_size=6), st.sampled_from([40, 257, 8192]), st.integers(0, 2**32 - 1))
def test_a_sequence_gets_the_same_tokens_alone_and_in_a_batch(params, vocab, seed):
    logits = np.random.default_rng(seed).normal(0, 3, (3, len(params), vocab)).astype(np.float32)

    def offset(rows):
        several = [sequence(eos=(5,), **params[row]) for row in rows]
        sampled = []
        for step in logits:
            rows_of_step = [SamplingRow(sequence) for sequence in several]
            sampled.append(sample(step[rows], StepSampling.of(rows_of_step)).tolist())
            for one, token in zip(several, sampled[-1], strict=True):
                one.append(token)
        return sampled

    together = offset(list(range(len(params))))
    for row in range(len(params)):
        assert offset([row]) == [[step[row]] for step in together]


@given(PARAMS, st.lists(st.integers(6, 30), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_token_behind_draft_tokens_is_sampled_as_if_they_had_been_sampled(params, drafts, seed):
    logits = np.random.default_rng(seed).normal(0, 3, (len(drafts) + 1, 40)).astype(np.float32)
    one, other = sequence(eos=(5,), **params), sequence(eos=(5,), **params)
    ahead = sample(
        logits.copy(), StepSampling.of([SamplingRow(one, tuple(drafts[:place])) for place in range(len(logits))])
    )
    for row, draft in zip(range(len(logits)), [*drafts, 0], strict=True):
        assert sample(logits[row : row + 1].copy(), StepSampling.of([SamplingRow(other)])).tolist() == [ahead[row]]
        other.append(draft)


def by_definition(logits, temperature, top_k, top_p, min_p):
    """Return the probabilities after top-k, top-p and min-p by sorting all tokens, in float64."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: top_k or len(order)]
    cumulated = np.cumsum(weights[kept])
    kept = kept[: np.searchsorted(cumulated, top_p * cumulated[-1]) + 1]
    kept = kept[weights[kept] >= min_p]
    probabilities = np.zeros(len(weights))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 2, 6]),
    st.sampled_from([0.5, 1, 1.7]),
    st.sampled_from([0, 5, 70]),
    st.sampled_from([0.3, 0.9, 1]),
    st.sampled_from([0, 0.01, 0.3]),
)
def test_only_tokens_that_the_limits_keep_are_sampled(seed, spread, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(0, spread, 3000).astype(np.float32)
    expected = by_definition(logits, temperature, top_k, top_p, min_p)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    rows = [SamplingRow(sequence(seed=seed + number, **params)) for number in range(64)]
    sampled = sample(np.tile(logits, (64, 1)), StepSampling.of(rows))
    # At a limit the last bit may decide. Only the token next to the limit may differ.
    allowed = expected > 0
    allowed[np.argsort(-logits, kind="stable")[: allowed.sum() + 1]] = True
    assert allowed[sampled].all()


def test_penalties_by_their_formulas():
    logits = np.array([[2.0, -2.0, 1.0, 1.0, 1.0]], np.float32)
    one = sequence(prompt=(0, 1), temperature=0, repetition_penalty=2, presence_penalty=0.25, frequency_penalty=0.125)
    for token in (3, 3, 1):
        one.append(token)
    # The repetition penalty counts prompt and completion. The other two count only the completion.
    expected = [2 / 2, -2 * 2 - 0.25 - 0.125, 1, 1 / 2 - 0.25 - 2 * 0.125, 1]
    apply(logits, [SamplingRow(one)])
    np.testing.assert_allclose(logits[0], expected)


@pytest.mark.parametrize(("penalty", "best"), [(1e-300, 0), (1e300, 2)])
def test_a_repetition_penalty_beyond_float32_leaves_logits_finite(penalty, best):
    logits = np.array([[2.0, 0.0, 1.0, -np.inf]], np.float32)
    assert sample(
        logits, StepSampling.of([SamplingRow(sequence(prompt=(0, 1, 3), temperature=0, repetition_penalty=penalty))])
    ).tolist() == [best]


def test_the_models_own_logits_stay_as_they_are_where_their_logprobs_are_requested():
    logits = np.array([[1.0, 2, 3], [3, 2, 1]], np.float32)
    before = logits.copy()
    biased = [sequence(temperature=0, logit_bias={0: 100}, logprobs=0), sequence(temperature=0, logit_bias={2: 100})]
    assert sample(logits, StepSampling.of([SamplingRow(sequence) for sequence in biased])).tolist() == [0, 2]
    np.testing.assert_array_equal(logits, before)


def test_min_tokens_keeps_the_end_away():
    logits = np.array([[9, 0, 8]], np.float32)
    one = sequence(temperature=0, min_tokens=2, eos=(0,), stop_token_ids=[2])
    tokens = []
    for _ in range(3):
        tokens.append(int(sample(logits.copy(), StepSampling.of([SamplingRow(one)]))[0]))
        one.append(tokens[-1])
    assert tokens == [1, 1, 0]


def test_the_last_token_of_a_bad_word_does_not_come_behind_its_others():
    one = sequence(temperature=0)
    one.request = replace(one.request, bad_word_ids=((3,), (1, 2), (1, 1, 2, 0)))
    kept = []
    for token in (1, 1, 2, 4):
        logits = np.zeros((1, 5), np.float32)
        apply(logits, [SamplingRow(one)])
        kept.append(np.flatnonzero(np.isfinite(logits[0])).tolist())
        one.append(token)
    assert kept == [[0, 1, 2, 4], [0, 1, 4], [0, 1, 4], [1, 2, 4]]


@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 64, 257, 5000]), st.integers(0, 20))
def test_logprobs_are_those_of_the_softmax(seed, vocab, top):
    logits = np.random.default_rng(seed).normal(0, 4, (3, vocab)).astype(np.float32)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    chosen = [vocab - 1, 0, vocab // 2]
    for row, entry in enumerate(token_logprobs(logits, range(3), chosen, [top] * 3)):
        assert (entry.token_id, entry.logprob) == (chosen[row], pytest.approx(expected[row, chosen[row]], abs=1e-5))
        best = np.argsort(-logits[row], kind="stable")[:top].tolist()
        assert [token for token, _ in entry.top] == best
        assert [logprob for _, logprob in entry.top] == pytest.approx(expected[row, best].tolist(), abs=1e-5)


def test_greedy_takes_the_first_of_equals():
    sampling = StepSampling.of([SamplingRow(sequence(temperature=0))])
    assert sample(np.array([[1, 3, 3]], np.float32), sampling).tolist() == [1]


def test_masked_tokens_are_never_sampled():
    logits = np.tile(np.array([-np.inf, 0, -np.inf], np.float32), (200, 1))
    sampling = StepSampling.of([SamplingRow(sequence(seed=seed)) for seed in range(200)])
    assert set(sample(logits, sampling).tolist()) == {1}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_spoil_their_own_row_only(bad):
    logits = np.array([[0, bad], [0, 1]], np.float32)
    for temperature in (0.0, 1e-6):
        rows = [SamplingRow(sequence(temperature=temperature)) for _ in range(2)]
        assert sample(logits, StepSampling.of(rows)).tolist() == [NO_TOKEN, 1]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1; it must be a number at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_k": -2}, "top_k is -2; it must be a number at least -1"),
        ({"top_p": 0}, "top_p is 0; it must be a number more than 0 and at most 1"),
        ({"top_p": 1.5}, r"top_p is 1\.5; it must be a number more than 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"max_tokens": 2.5}, r"max_tokens is 2\.5; it must be a whole number"),
        ({"seed": 2**64}, "seed is"),
        ({"stop": [""]}, "stop has ''"),
        ({"stop_token_ids": [-5]}, "stop_token_ids is -5"),
        ({"min_p": 1.01}, r"min_p is 1\.01; it must be a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be a number more than 0"),
        ({"presence_penalty": 2.5}, r"presence_penalty is 2\.5; it must be a number from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3; it must be a number from -2 to 2"),
        ({"logit_bias": {5: 101}}, "logit_bias is 101; it must be a number from -100 to 100"),
        ({"logit_bias": {-1: 1}}, "logit_bias is -1"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias has 1025 entries; the limit is 1024"),
        ({"n": 0}, "n is 0; it must be a number from 1 to 128"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; it must be a number from 0 to 4"),
        ({"time_limit_ms": 0}, "time_limit_ms is 0; it must be a number at least 1"),
        ({"logprobs": 21}, "logprobs is 21; it must be a number from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"stop": 5}, "stop is 5, which cannot be used: 'int' object is not iterable"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, which cannot be used"),
        ({"logit_bias": [5]}, r"logit_bias is \[5\], which cannot be used"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be true or false"),
        ({"guided": {"regex": "a"}}, "guided is {'regex': 'a'}; it must be a Guided"),
    ],
)
def test_parameters_out_of_range(params, message):
    with pytest.raises(FieldError, match=message) as caught:
        SamplingParams(**params)
    assert caught.value.field == next(iter(params))


def test_none_is_the_default():
    assert SamplingParams(**dict.fromkeys(SamplingParams.__dataclass_fields__)) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "guided has nothing; set exactly one of json, regex and grammar"),
        ({"json": "{}", "regex": "a"}, "guided has json and regex; set exactly one"),
        ({"regex": ""}, "guided.regex is ''; it must be a text"),
        ({"grammar": "x" * 65537}, "guided.grammar has 65537 characters; the limit is 65536"),
        ({"json": {"enum": [{1}]}}, "guided.json cannot be written as JSON"),
    ],
)
def test_guides_that_are_no_guides(given, message):
    with pytest.raises(FieldError, match=message):
        Guided(**given)


def test_a_schema_is_text_or_an_object():
    assert Guided(json={"type": "integer"}) == Guided(json='{"type": "integer"}')
