from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharp.serving import SamplingParams
from sharp.serving.engine.sampler import NO_TOKEN, sample
from sharp.serving.errors import FieldError
from sharp.serving.guided import Guided

LOGITS = np.log(np.array([0.4, 0.05, 0.3, 0.2, 0.05], np.float32))
DRAWS = 4000


def sequence(**params):
    """What the sampler needs of a sequence."""
    params = SamplingParams(**params)
    return SimpleNamespace(
        request=SimpleNamespace(params=params), random=np.random.Generator(np.random.Philox(params.seed))
    )


def shares(**params) -> np.ndarray:
    """How often each token is drawn."""
    one = sequence(seed=1, **params)
    drawn = sample(np.tile(LOGITS, (DRAWS, 1)), [one] * DRAWS)
    return np.bincount(drawn, minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.05, 0.3, 0.2, 0.05]),
        ({"temperature": 0.5}, np.array([0.16, 0.0025, 0.09, 0.04, 0.0025]) / 0.295),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_p": 0.6}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 0, 3 / 7, 0, 0]),  # of 0.9 the first has 0.44
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"top_k": 100}, [0.4, 0.05, 0.3, 0.2, 0.05]),
        ({"temperature": 1e-300}, [1, 0, 0, 0, 0]),
    ],
)
def test_distribution(params, expected):
    # Five standard deviations of a share of 4000 draws.
    np.testing.assert_allclose(shares(**params), expected, atol=5 * 0.5 / DRAWS**0.5)
    assert (shares(**params)[np.array(expected) == 0] == 0).all()


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.3, 1, 2]),
        "top_k": st.sampled_from([0, 1, 3, 40]),
        "top_p": st.sampled_from([0.2, 0.9, 1]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=50, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_sequence_gets_the_same_tokens_alone_and_in_a_batch(params, seed):
    logits = np.random.default_rng(seed).normal(0, 3, (3, len(params), 40)).astype(np.float32)
    together = [sequence(**p) for p in params]
    batched = [sample(step, together).tolist() for step in logits]
    for row, p in enumerate(params):
        alone = sequence(**p)
        assert [sample(step[row : row + 1], [alone])[0] for step in logits] == [step[row] for step in batched]


def test_greedy_takes_the_first_of_equals():
    assert sample(np.array([[1, 3, 3]], np.float32), [sequence(temperature=0)]).tolist() == [1]


def test_masked_tokens_are_never_drawn():
    logits = np.tile(np.array([-np.inf, 0, -np.inf], np.float32), (200, 1))
    assert set(sample(logits, [sequence(seed=0)] * 200).tolist()) == {1}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_spoil_their_own_row_only(bad):
    logits = np.array([[0, bad], [0, 1]], np.float32)
    for temperature in (0.0, 1e-6):
        rows = [sequence(temperature=temperature), sequence(temperature=temperature)]
        assert sample(logits, rows).tolist() == [NO_TOKEN, 1]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1; it must be a number at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_k": -1}, "top_k is -1"),
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
    ],
)
def test_parameters_out_of_range(params, message):
    with pytest.raises(FieldError, match=message) as caught:
        SamplingParams(**params)
    assert caught.value.field == next(iter(params))


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
