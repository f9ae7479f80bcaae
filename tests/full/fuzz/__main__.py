"""`python -m tests.full.fuzz`."""

from tests.full.fuzz.fuzz import main

main()
