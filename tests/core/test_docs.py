"""`sharp docs` shows the pages that help and errors name, without the repository."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.core import docs_cli
from sharp.core.cli import main

ROOT = Path(__file__).parents[2]


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["docs", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("asked", ["how-to/gpu", "gpu", "docs/how-to/gpu.md", "how-to/gpu.md#drivers"])
def test_a_page_is_shown_by_its_name_or_path(asked: str) -> None:
    assert shown(asked) == (ROOT / "docs" / "how-to" / "gpu.md").read_text()


def test_all_pages_are_listed_with_their_titles() -> None:
    lines = shown().splitlines()
    assert re.search(r"^adapt +From softmax to entmax, SSA or adaptive temperature$", "\n".join(lines), re.MULTILINE)
    assert len(lines) > 40 and not any(line.startswith(("decisions/", "clients/")) for line in lines)


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("adpat", "did you mean 'adapt'?"),
        ("structured-outputs", "did you mean 'how-to/structured-output'?"),
        ("../README", "did you mean 'norms/README'?"),
        ("zzz", "sharp docs lists all pages"),
    ],
)
def test_an_unknown_page_is_one_sentence(asked: str, hint: str) -> None:
    result = CliRunner().invoke(main, ["docs", asked])
    assert (result.exit_code, result.output) == (2, f"Error: there is no page {asked!r}; {hint}\n")


def test_missing_documents_are_one_sentence(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(docs_cli, "FOLDER", tmp_path)
    result = CliRunner().invoke(main, ["docs"])
    assert result.exit_code == 2 and "the documents are not installed" in result.output


def test_every_page_that_a_message_names_is_there() -> None:
    named = set()
    for package in ("core", "exporter", "models", "plugins", "serving"):
        for path in (ROOT / package).rglob("*.py"):
            code = path.read_text(encoding="utf-8")
            named |= set(re.findall(r"\bsharp docs ([a-z][\w/-]*[\w])", code))
            assert not re.search(r"^[^#\n]*(?:see|also:?) docs/", code, re.MULTILINE), path
    named -= {"shows", "lists"}  # sentences about the command
    assert len(named) > 15 and named <= docs_cli.pages().keys()


def test_a_terminal_gets_a_rendered_page() -> None:
    text = docs_cli.rendered("# Title\n\nSee `sharp` in [a page](page.md).\n")
    assert "\x1b[" in text and "# Title" not in text and "page.md" in text
