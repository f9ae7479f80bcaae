"""Progress in phases: lines in a log, and on a terminal one bar that never goes back."""

import io
import re

from rich.console import Console

from sharp.exporter.phases import PhaseBar, PhaseLines


def test_a_log_has_a_line_for_every_phase_and_one_every_ten_seconds() -> None:
    now, out = [100.0], io.StringIO()
    lines = PhaseLines(Console(file=out, width=80), 98.0, lambda: now[0])
    advance = lines("Measuring [the] teacher", 30)
    for _ in range(30):
        now[0] += 0.9
        advance()
    lines("Training", 2)
    assert out.getvalue().splitlines() == [
        "   2.0 s  Measuring [the] teacher",
        "  12.8 s  Measuring [the] teacher: 12 of 30",
        "  23.6 s  Measuring [the] teacher: 24 of 30",
        "  29.0 s  Training",
    ]


def test_one_bar_goes_over_all_phases_and_never_back() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    shown: list[float] = []
    with PhaseBar(console, 0.0, {"read": 2.0, "measure": 3.0, "trace": 1.0, "verify": 4.0}) as phase:
        (task,) = phase.progress.tasks
        for name, steps, done in (("read", 1, 0), ("trace", 2, 1), ("verify", 4, 6), ("read", 1, 1), ("other", 1, 1)):
            advance = phase(name, steps)
            shown.append(task.completed)
            for _ in range(done):
                advance()
                shown.append(task.completed)
    assert shown[:5] == [0.0, 5.0, 5.5, 6.0, 7.0]  # measure does not come
    assert shown == sorted(shown)
    assert shown[-1] == task.completed == 10.0 and task.finished
    assert re.findall(r"\d+%", out.getvalue())[-1] == "100%"


def test_the_bar_of_a_failed_command_is_removed() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    bar = PhaseBar(console, 0.0, {"read": 1.0})
    try:
        with bar as phase:
            phase("read", 1)
            raise ValueError
    except ValueError:
        pass
    assert not bar.progress.tasks[0].visible
