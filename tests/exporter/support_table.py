"""The table of docs/reference/architectures.md, made from the results of a test run.

This command writes the table:

SHARP_UPDATE_TABLE=1 .venv/bin/python -m pytest tests/full/exporter/test_every_architecture.py

Without the variable, the run fails if the page differs from the table.
"""

from pathlib import Path

from sharp.exporter.checkpoints.architectures import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
BEGIN = "<!-- Written by tests/exporter/support_table.py from a test run; do not edit. -->\n"
END = "<!-- End of the written part. -->\n"
FORMS = ("paged", "contiguous", "none")
# The same code traces the other forms of every decoder. These decoders are tested in all forms, the others in the
# server's.
IN_EVERY_FORM = ("llama", "qwen2", "gemma2", "gpt2", "smollm3", "gpt_oss", "flint")

# Maps (model_type, form) to a description of what the test compared.
Seen = dict[tuple[str, str], str]


def expected() -> set[tuple[str, str]]:
    """Return the cells of a whole run: `IN_EVERY_FORM` in all forms, other models in one form."""
    return {
        (name, form)
        for name, architecture in ARCHITECTURES.items()
        for form in (("none",) if architecture.kind == "encoder" else FORMS if name in IN_EVERY_FORM else FORMS[:1])
    }


def table(seen: Seen) -> str:
    """Return the table in Markdown."""
    rows = [f"| `model_type` | models | beside grouped queries | {' | '.join(f'`{form}`' for form in FORMS)} |"]
    rows.append("| --- " * (3 + len(FORMS)) + "|")
    for name, architecture in ARCHITECTURES.items():
        cells = [seen.get((name, form), "") for form in FORMS]
        rows.append(f"| {name} | {architecture.models} | {architecture.notes} | {' | '.join(cells)} |")
    return "\n".join(" ".join(row.split()) for row in rows) + "\n"


def written() -> str:
    """Return the table that the page has now."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def write(content: str) -> None:
    """Replace the table of the page by `content`."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + content + END + rest.split(END)[1], encoding="utf-8")
