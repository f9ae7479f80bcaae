"""Progress of a command that works in phases: lines in a log, or one bar on a terminal."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_SECONDS = 10.0  # between two lines of one phase


class PhaseLines:
    """Progress as lines with the seconds since `began`: when a phase begins, and every ten seconds while it goes on."""

    def __init__(self, console: Console, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._began, self._clock = console, began, clock

    def __call__(self, name: str, steps: int) -> Callable[[], None]:
        """Announce a phase; return a function to call after each of its steps."""
        self._line(name)
        done, shown = 0, self._clock()

        def advance() -> None:
            """Count one step, and print a line every `LINE_SECONDS`."""
            nonlocal done, shown
            done += 1
            if done < steps and self._clock() - shown >= LINE_SECONDS:
                shown = self._clock()
                self._line(f"{name}: {done} of {steps}")

        return advance

    def _line(self, text: str) -> None:
        """Print a line that begins with the seconds since the start."""
        self._console.print(f"{self._clock() - self._began:6.1f} s  {text}", highlight=False, markup=False)


class PhaseBar:
    """One bar over all phases of a command, which never goes back; lines if the console is no terminal.

    `shares` has the name of every phase that may come, in their order, with its usual share of the time. A phase that
    does not come is skipped. Used as a context, which the bar leaves with the end of the command's work.
    """

    def __init__(self, console: Console, began: float, shares: Mapping[str, float]) -> None:
        self._lines = None if console.is_terminal else PhaseLines(console, began)
        self._shares = dict(shares)
        self.progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task(next(iter(self._shares)), total=sum(self._shares.values()))

    def __enter__(self) -> "PhaseBar":
        """Show the bar."""
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Fill the bar, or remove it after an error."""
        if kind is None:
            self.progress.update(self._task, completed=sum(self._shares.values()))
        else:
            self.progress.update(self._task, visible=False)
        self.progress.stop()

    def __call__(self, name: str, steps: int) -> Callable[[], None]:
        """Begin a phase; return a function to call after each of its steps."""
        if self._lines is not None:
            return self._lines(name, steps)
        names = list(self._shares)
        before = sum(self._shares[earlier] for earlier in names[: names.index(name)]) if name in names else 0.0
        self._reach(before)
        self.progress.update(self._task, description=name)
        done = 0

        def advance() -> None:
            """Count one step, and move the bar by its share of the phase."""
            nonlocal done
            done += 1
            self._reach(before + self._shares.get(name, 0.0) * min(1.0, done / steps))

        return advance

    def _reach(self, completed: float) -> None:
        self.progress.update(self._task, completed=max(completed, self.progress.tasks[0].completed))
