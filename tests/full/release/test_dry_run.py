"""The refusals of `make release-dry-run`, and the notes that it takes from the changelog."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("dry_run", ROOT / "deploy" / "release" / "dry_run.py")
dry_run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(dry_run)

CHANGELOG = """# Changelog

Introduction.

## Unreleased

- new

## 0.2.0 - 2026-12-01

- second

## 0.1.0

- first
"""


def test_notes_are_the_versions_part_of_the_changelog():
    assert dry_run.release_notes(CHANGELOG, "0.2.0", tagged=True) == "- second\n"
    assert dry_run.release_notes(CHANGELOG, "0.2.0", tagged=False) == "- new\n"


@pytest.mark.parametrize("changelog", [CHANGELOG, "", "## 0.3.0\n\n"])
def test_a_tagged_version_without_notes_is_refused(changelog):
    with pytest.raises(SystemExit, match=r"0\.3\.0"):
        dry_run.release_notes(changelog, "0.3.0", tagged=True)


def test_the_tag_is_the_version():
    assert dry_run.check_tags(["v0.2.0", "benchmark"], "0.2.0")
    assert not dry_run.check_tags(["benchmark"], "0.2.0")
    with pytest.raises(SystemExit, match=r"v0\.3\.0"):
        dry_run.check_tags(["v0.3.0"], "0.2.0")
