"""Patterns for the formats of dates and times in JSON schemas, so that guides write only those that exist."""

from typing import Any

LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
DATE = rf"(\d{{4}}-(0[13-9]|1[0-2])-\d\d|\d{{4}}-02-([01]\d|2[0-8])|{LEAP_YEAR}-02-29)"
TIME = r"\d\d:\d\d:[0-5]\d"  # no leap second, because a grammar cannot know the days on which UTC has one
PATTERNS = {"date": f"^{DATE}$", "time": f"^{TIME}", "date-time": f"^{DATE}[Tt]{TIME}"}
VALUES = ("const", "enum", "default", "examples")  # keys whose values are no schemas


def with_real_dates(schema: Any) -> Any:
    """Return a JSON schema that takes only dates and times that exist: no 29 February of 2021, no second of 60."""
    if isinstance(schema, list):
        return [with_real_dates(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: value if name in VALUES else with_real_dates(value) for name, value in schema.items()}
    form = schema.get("format")
    if isinstance(form, str) and form in PATTERNS:
        others = inner.get("allOf")
        inner["allOf"] = [*(others if isinstance(others, list) else ()), {"pattern": PATTERNS[form]}]
    return inner
