"""Tests with modules that were not written for Sharp."""
