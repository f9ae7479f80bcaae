"""The parameters of a request as KServe's clients send them; those of HTTP are in test_openai.py."""

import json

import pytest
from pydantic import ValidationError

from sharp.serving.sampling_fields import SamplingFields, first_error


def test_numbers_may_be_strings():
    given = {"temperature": "0.5", "top_k": "3", "max_tokens": "4", "ignore_eos": "true", "logit_bias": {"97": "-1"}}
    given |= {"include_stop_str_in_output": "true", "priority": "2"}
    params = SamplingFields.model_validate(json.loads(json.dumps(given))).params()
    assert (params.temperature, params.top_k, params.max_tokens, params.ignore_eos) == (0.5, 3, 4, True)
    assert params.include_stop_str_in_output is True
    assert params.logit_bias == ((97, -1.0),)
    assert SamplingFields.model_validate({"priority": None, "cache_salt": None}) == SamplingFields()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": False}, "temperature"),
        ({"priority": True}, "priority"),
        ({"stop_token_ids": [True]}, "stop_token_ids.0"),
        ({"logit_bias": {"97": True}}, "logit_bias.97"),
    ],
)
def test_true_is_no_number(fields, field):
    with pytest.raises(ValidationError) as caught:
        SamplingFields.model_validate(fields)
    assert str(first_error(caught.value)) == f"{field} cannot be used: Input should be a number, not true or false"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a", 5]}, "stop cannot be used: Input should be a text or a list of texts"),
        ({"guided": {"json": 5}}, "guided.json cannot be used: Input should be a JSON schema, or the text of one"),
    ],
)
def test_a_field_of_several_types_says_what_it_takes(fields, message):
    with pytest.raises(ValidationError) as caught:
        SamplingFields.model_validate(fields)
    assert str(first_error(caught.value)) == message
