"""The table of docs/reference/architectures.md, made from what a test run has just seen working.

SHARP_UPDATE_TABLE=1 .venv/bin/python -m pytest tests/full/exporter/test_every_architecture.py

writes it; without the variable, the run fails where the page says something else.
"""

from pathlib import Path

from sharp.exporter.checkpoints.architectures import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
BEGIN = "<!-- Written by tests/exporter/support_table.py from a test run; do not edit. -->\n"
END = "<!-- End of the written part. -->\n"
FORMS = ("paged", "contiguous", "none")
# Another form is traced by the same code: those of other decoders were tried once, ad hoc.
IN_EVERY_FORM = ("llama", "qwen2", "gemma2", "gpt2", "smollm3", "gpt_oss", "flint")

# (model_type, form) -> what the test compared
Seen = dict[tuple[str, str], str]


def expected() -> set[tuple[str, str]]:
    """What a whole run sees: decoders in every form or in the server's, encoders in the only one that they have."""
    return {
        (name, form)
        for name, architecture in ARCHITECTURES.items()
        for form in (("none",) if architecture.kind == "encoder" else FORMS if name in IN_EVERY_FORM else FORMS[:1])
    }


def table(seen: Seen) -> str:
    """The table in Markdown."""
    rows = [f"| `model_type` | models | beside grouped queries | {' | '.join(f'`{form}`' for form in FORMS)} |"]
    rows.append("| --- " * (3 + len(FORMS)) + "|")
    for name, architecture in ARCHITECTURES.items():
        cells = [seen.get((name, form), "") for form in FORMS]
        rows.append(f"| {name} | {architecture.models} | {architecture.notes} | {' | '.join(cells)} |")
    return "\n".join(" ".join(row.split()) for row in rows) + "\n"


def written() -> str:
    """The table that the page has now."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def write(content: str) -> None:
    """Put a table into the page in place of the one that is there."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + content + END + rest.split(END)[1], encoding="utf-8")
