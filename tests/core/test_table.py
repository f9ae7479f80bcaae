"""A table becomes a list where the terminal is too narrow for it."""

from io import StringIO

from rich.console import Console

from sharp.core.table import Table


def printed(table: Table, width: int) -> list[str]:
    shown = StringIO()
    Console(file=shown, width=width).print(table)
    return [line.rstrip() for line in shown.getvalue().splitlines()]


def architectures() -> Table:
    table = Table("model_type", "models", "notes", title="Models")
    table.add_row("llama", "Llama 2 and 3", "rotary_positions")
    table.add_row("gemma3_text", "", "[bold]sliding_window[/]")
    return table


def test_a_table_that_fits_stays_one():
    assert any("\u2502" in line for line in printed(architectures(), 60))


def test_at_forty_columns_a_row_is_an_entry_of_a_list():
    assert printed(architectures(), 40) == [
        "Models",
        "model_type: llama",
        "  models: Llama 2 and 3",
        "  notes: rotary_positions",
        "model_type: gemma3_text",
        "  notes: sliding_window",
    ]


def test_lines_wrap_below_themselves_and_names_of_columns_may_be_hidden():
    table = Table(show_header=False, box=None)
    table.add_row("page", "http://127.0.0.1:36127/v2/models/smollm2-ssa is the page")
    assert printed(table, 40) == ["page", "  http://127.0.0.1:36127/v2/models/smoll", "  m2-ssa is the page"]
