"""The notebooks of the documents run, and print and draw what is saved in them.

`python -m tests.full.docs.notebook docs/notebooks/NAME.ipynb` saves their present output.
"""

import re
from pathlib import Path

import nbformat
import pytest

from tests.full.docs.notebook import execute, printed

ROOT = Path(__file__).parents[3]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    for name in ("models", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    kept = nbformat.read(path, as_version=4)
    found = printed(execute(nbformat.read(path, as_version=4), folder))
    shown = printed(kept)
    assert NUMBER.sub("", found) == NUMBER.sub("", shown) != ""
    pairs = list(zip(NUMBER.findall(found), NUMBER.findall(shown), strict=True))
    # Another processor rounds sums differently, which changes an entropy by one digit, and a share by two of 50 values.
    far = [pair for pair in pairs if abs(float(pair[0]) - float(pair[1])) > (0.02 if "." in pair[1] else 4)]
    assert far == []
    assert (folder / f"{path.stem}.svg").stat().st_size > 10_000
