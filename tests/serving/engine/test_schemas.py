"""A guide of a JSON schema allows what Python's calendar and the package `jsonschema` call valid."""

import json
from datetime import date, datetime, time
from itertools import product

import jsonschema
import pytest

from sharp.serving.engine.guide import prepared_schema
from sharp.serving.engine.guide_worker import make_matcher, make_vocabulary
from tests.serving.conftest import EOS, VOCAB, byte_tokenizer


@pytest.fixture(scope="module")
def allows():
    vocabulary = make_vocabulary(byte_tokenizer().to_str(), VOCAB, [EOS])

    def check(schema, *values):
        """Return which of the values a guide allows, or None if it refuses the schema."""
        matcher = make_matcher(vocabulary, "json", prepared_schema(json.dumps(schema), compact=True))
        if matcher.get_error():
            return None
        found = []
        for value in values:
            matcher.reset()
            text = json.dumps(value, separators=(",", ":")).encode()
            found.append(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())
        return found

    return check


def exists(parse, text):
    try:
        parse(text)
    except ValueError:
        return False
    return True


DAYS = [
    f"{year}-{day}" for year in (1900, 1999, 2000, 2024, 2021, 2400) for day in ("02-28", "02-29", "02-30", "04-31")
]


def test_dates_and_times_are_those_of_the_calendar(allows):
    assert allows({"format": "date"}, *DAYS) == [exists(date.fromisoformat, day) for day in DAYS]
    moments = [f"{day}T{clock}Z" for day in DAYS for clock in ("23:59:59", "23:58:60", "24:00:00")]
    real = [exists(datetime.fromisoformat, moment) and "T24" not in moment for moment in moments]
    for schema in ({"format": "date-time"}, {"allOf": [{"type": "string"}], "format": "date-time"}):
        assert allows(schema, *moments) == real
    clocks = ["00:00:00Z", "22:59:60Z", "23:59:59.5+01:00"]
    assert allows({"format": "time"}, *clocks) == [exists(time.fromisoformat, clock) for clock in clocks]
    named = {"type": "object", "properties": {"format": {"const": {"format": "date"}}}, "required": ["format"]}
    assert allows(named, {"format": {"format": "date"}}) == [True]


PARTS = ({"type": "string"}, {"enum": ["x", 1]}, {"minimum": 1}, False)
VALUES = ("x", "y", 0, 1, None)


@pytest.mark.parametrize("closed", [{}, {"additionalProperties": False}])
def test_a_pattern_that_overlaps_a_property_binds_it(allows, closed):
    texts = [{}, *({"ab": value} for value in VALUES), *({"ab": value, "ac": "x"} for value in VALUES)]
    for own, pattern, required in product(PARTS, PARTS, ([], ["ab"])):
        schema = {"type": "object", "properties": {"ab": own}, "patternProperties": {"^a": pattern}, **closed}
        schema |= {"required": required} if required else {}
        validator = jsonschema.Draft202012Validator(schema)
        valid = [validator.is_valid(text) for text in texts]
        found = allows(schema, *texts)
        assert found == valid or (found is None and not any(valid))  # a refusal is right only if no value is valid
