"""Lines of prose in the documents: `make lint` fails where one is longer than 120 columns.

`python -m tests.line_lengths` prints every such line; the exit code is 1 if there is one. Tables, code blocks and lines
that cannot be broken are left out.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = 120
UNBREAKABLE = re.compile(r"\s*(?:\||(?:[-*>] )?\S+$)")  # a row of a table; a line of one word


def long_lines(text: str) -> list[int]:
    """Return the numbers of the lines of prose that are too long."""
    numbers = []
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and len(line) > COLUMNS and not UNBREAKABLE.match(line):
            numbers.append(number)
    return numbers


def main() -> int:
    """Print the long lines of all pages that git has, and return the exit code."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    found = [
        f"{name}:{number}: break this line at {COLUMNS} columns"
        for name in listed.stdout.splitlines()
        for number in long_lines((ROOT / name).read_text(encoding="utf-8"))
    ]
    for message in found:
        print(message)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
