"""`Table`: a table of rich that becomes a list where the terminal is too narrow for it."""

from __future__ import annotations

from rich import table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.text import Text

WIDEST = 10_000  # columns; more than any table needs


class Table(table.Table):
    """A table, or a list with an entry for each row if the terminal would break words of the table.

    The first cell of a row begins an entry. The other cells follow it, each in a line of its own behind the title of
    its column; empty cells are left out.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, or the list if the table's minimum width is above that of the terminal."""
        needed = Measurement.get(console, options.update_width(WIDEST), self).minimum
        if needed <= options.max_width or not self.columns:
            yield from super().__rich_console__(console, options)
            return
        if self.title is not None:
            yield self.title if isinstance(self.title, Text) else Text.from_markup(str(self.title), style="italic")
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            indentation = 0
            for column, cell in zip(self.columns, cells, strict=True):
                shown = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
                header = str(column.header) if self.show_header else ""
                if not shown.plain.strip():
                    continue
                line = Text.assemble(f"{header}: " if header else "", shown)
                yield Padding(line, (0, 0, 0, indentation))
                indentation = 2
