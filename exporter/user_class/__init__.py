"""The export of a user's own class with weights from a trainer (`sharp export FILE.py:CLASS --weights FILE`)."""
