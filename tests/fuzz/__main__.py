"""`python -m tests.fuzz`."""

from tests.fuzz.fuzz import main

main()
