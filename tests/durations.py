"""Writes `tests/durations.json`: the tests that take over a second, with their seconds.

    make test-all
    .venv/bin/python -m tests.durations build/tests.xml

`tests/conftest.py` leaves out tests by this file. A test that the given files do not name keeps its seconds.
"""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_suffix(".json")
SLOW = 1.0


def main() -> None:
    """Read pytest's reports (`--junitxml`), whose paths are the arguments."""
    seconds = json.loads(FILE.read_text()) if FILE.exists() else {}
    for report in sys.argv[1:]:
        for case in ElementTree.parse(report).iter("testcase"):
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            seconds[test] = round(float(case.get("time", "0")), 1)
    slow = {test: taken for test, taken in sorted(seconds.items()) if taken > SLOW}
    FILE.write_text(json.dumps(slow, indent=0) + "\n")


if __name__ == "__main__":
    main()
