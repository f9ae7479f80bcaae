"""Check the links between the documents: `make lint` fails where a file or a heading does not exist.

`python -m tests.links` prints every dead link; the exit code is 1 if there is one.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        number = sum(other == anchor or other.rpartition("-")[0] == anchor for other in found)
        found.add(f"{anchor}-{number}" if anchor in found else anchor)
    return found


def main() -> int:
    """Print the dead links of all pages in git, and return the exit code."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    dead = 0
    for name in listed.stdout.splitlines():
        page = ROOT / name
        for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page if not path else page.parent / path
            if not target.exists():
                print(f"{name}: {link} is no file")
                dead += 1
            elif anchor and anchor not in anchors(target):
                print(f"{name}: {link} is no heading")
                dead += 1
    return int(dead > 0)


if __name__ == "__main__":
    sys.exit(main())
