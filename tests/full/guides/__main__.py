"""Print a table of the outcomes of guides for every draft in the suite's folder `json/tests`."""

import sys
from pathlib import Path

from tests.full.guides.suite import table

print(table(Path(sys.argv[1])))
