"""No guide allows a text that its schema forbids, by JSON Schema's own tests."""

import os
from pathlib import Path

import pytest

from tests.full.guides.suite import outcomes

SUITE = os.environ.get("JSON_SCHEMA_TEST_SUITE", "")  # the folder json/tests of jsonschema's source package
# The library reads `additionalItems` and `$id` at places where they have no meaning, ignores `contentEncoding`, and
# uses Rust's `\S`, which matches a byte order mark. Draft 3 is left out, because the library does not know its
# keywords.
KNOWN = (
    "additionalItems does not look in applicators",
    "$ref prevents a sibling $id from changing the base uri",
    "validation of string-encoded content",
    "validation of binary",
    "ECMA 262 \\S matches everything but whitespace",
)


@pytest.mark.skipif(not SUITE, reason="JSON_SCHEMA_TEST_SUITE names no suite")
@pytest.mark.parametrize("draft", ["draft4", "draft6", "draft7", "draft2019-09", "draft2020-12"])
def test_no_guide_allows_what_its_schema_forbids(draft):
    wrong = [name for _, name, kind in outcomes(Path(SUITE) / draft) if kind == "wrong"]
    assert [name for name in wrong if not name.startswith(KNOWN)] == []
