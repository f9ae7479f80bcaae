"""Pages about mistakes and about other programs say what the code says: messages, flags and archived figures."""

import json
import re
from functools import cache
from pathlib import Path

import click
import pytest

from sharp.core.cli import load_command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("core", "plugins", "models", "exporter", "serving")


@cache
def texts() -> str:
    """The sources of the packages, in which the parts of a text over several lines are joined."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return "\n".join(re.sub(r'"\s*\n\s*[rf]?"', "", path.read_text(encoding="utf-8")) for path in paths)


def rows(page: str, title: str = "") -> list[list[str]]:
    """The cells of all rows of tables below a heading of a page, or of the whole page."""
    content = (DOCS / page).read_text(encoding="utf-8")
    section = content.partition(f"## {title}\n")[2].partition("\n## ")[0] if title else content
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in re.findall(r"^\|.*\|$", section, re.M)]


def messages() -> list[str]:
    """The parts between dots of the messages in the first column of the page about troubles."""
    quoted = [text for row in rows("troubleshooting.md") for text in re.findall(r"`([^`]+)`", row[0])]
    return [part.strip() for text in quoted for part in text.split("...") if len(part.strip()) > 3]


@pytest.mark.parametrize("part", messages())
def test_a_message_on_the_page_of_troubles_is_one_of_ours(part):
    known = ("Address already in use", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED")  # of the system and of gRPC
    pattern = "|".join(map(re.escape, known)) if part in known else None
    for piece in re.split("|".join(known) + r"|--grpc-port", part):
        assert piece.strip("; ") in texts() or pattern, part


def flags_of(command: str) -> set[str]:
    return {
        name
        for parameter in load_command(command).params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def test_the_flags_that_vllm_users_are_given_exist():
    page = (DOCS / "how-to" / "from-vllm.md").read_text()
    same = re.findall(r"`(--[\w-]+)`", page.partition("## Names that are the same")[2].partition("\n\n- ")[0])
    assert len(same) > 10
    assert set(same) <= flags_of("serve")
    others = {
        flag for row in rows("how-to/from-vllm.md", "Other names") for flag in re.findall(r"`(--[\w-]+)`", row[1])
    }
    assert others and others <= flags_of("serve") | flags_of("export")
    lines = re.findall(r"^sharp serve .*$", page, re.M)
    assert lines and {flag for line in lines for flag in re.findall(r"--[\w-]+", line)} <= flags_of("serve")


@pytest.mark.parametrize("archive", ["llama_epyc_int4", "generation_epyc"])
def test_the_speed_beside_other_programs_is_the_archived_one(archive):
    page = (DOCS / "comparison.md").read_text()
    table = page.partition(f"results/{archive}.json")[2].partition("|\n\n")[0]
    shown = {
        cells[0]: cells[1:]
        for line in re.findall(r"^\| (.*) \|?$", table + "|", re.M)
        if re.search(r"\d", (cells := line.strip("| ").split(" | "))[1])
    }
    archived = json.loads((ROOT / "bench" / "results" / f"{archive}.json").read_text())["rows"]
    expected = {
        row["runtime"]: [
            f"{row['decode_tokens_per_second']:.1f}",
            f"{row['first_token_ms']:.0f}",
            f"{row['weight_bytes'] / 1e6:.0f}",
        ]
        for row in archived
    }
    assert shown == expected
