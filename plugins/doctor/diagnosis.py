"""What `sharp doctor` finds: every backend of this machine beside the float64 reference."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from sharp.plugins.doctor.backends import Backend, backends
from sharp.plugins.doctor.case import NORMALIZERS, Case, errors, limits, make_case
from sharp.plugins.doctor.machine import describe
from sharp.plugins.errors import SharpError

__all__ = ["Comparison", "Diagnosis", "as_json", "backends", "describe", "diagnose", "print_diagnoses"]

Status = Literal["agrees", "differs", "failed", "absent"]


@dataclass(frozen=True)
class Comparison:
    """One case on one backend: the errors and what they may be at most."""

    normalizer: str
    dtype: str
    errors: dict[str, float]
    limits: dict[str, float]

    @property
    def agrees(self) -> bool:
        """Whether every error is within its limit; NaN never is."""
        return all(self.errors[name] <= limit for name, limit in self.limits.items())


@dataclass(frozen=True)
class Diagnosis:
    """What became of a backend; `reason` is why it is absent or has failed."""

    name: str
    status: Status
    reason: str
    comparisons: tuple[Comparison, ...]


def diagnose(backend: Backend) -> Diagnosis:
    """Run all cases of a backend that is there; a library that was compiled without some kernels is not wrong."""
    comparisons: list[Comparison] = []
    reason = ""
    try:
        try:
            backend.ready()
        except SharpError as error:
            return Diagnosis(backend.name, "absent", str(error), ())
        for dtype, normalizer in product(backend.dtypes, NORMALIZERS):
            try:
                comparisons.append(_compare(backend, make_case(normalizer, dtype)))
            except Exception as error:
                if "has no kernel" not in str(error):
                    raise
                reason = reason or _first_line(error)
    except Exception as error:  # whatever a runtime raises, or a package that is broken, is the finding
        return Diagnosis(backend.name, "failed", f"{type(error).__name__}: {_first_line(error)}", tuple(comparisons))
    if not comparisons:
        return Diagnosis(backend.name, "absent", reason, ())
    status: Status = "agrees" if all(each.agrees for each in comparisons) else "differs"
    return Diagnosis(backend.name, status, reason, tuple(comparisons))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _compare(backend: Backend, case: Case) -> Comparison:
    return Comparison(case.normalizer, case.dtype, errors(case, backend.run(case)), limits(case))


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """JSON has no NaN: an error that is no number is null."""
    written = asdict(diagnosis)
    for comparison in written["comparisons"]:
        comparison["errors"] = {n: e if math.isfinite(e) else None for n, e in comparison["errors"].items()}
    return written


def print_diagnoses(machine: dict[str, str], found: Sequence[Diagnosis]) -> None:
    """Print tables, and a line for whatever is not as it should be."""
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    table = Table(show_header=False, box=None)
    for name, value in machine.items():
        table.add_row(name, value)
    console.print(table)
    table = Table(title="Largest error of the output beside the float64 reference", title_justify="left")
    for column in ("backend", "type", *NORMALIZERS, ""):
        table.add_column(column, justify="right" if column in NORMALIZERS else "left")
    for each in found:
        for number, dtype in enumerate(dict.fromkeys(c.dtype for c in each.comparisons)):
            by_normalizer = {c.normalizer: c for c in each.comparisons if c.dtype == dtype}
            cells = [_cell(by_normalizer.get(normalizer)) for normalizer in NORMALIZERS]
            table.add_row(each.name if number == 0 else "", dtype, *cells, each.status if number == 0 else "")
        if not each.comparisons:
            table.add_row(each.name, "", *("" for _ in NORMALIZERS), each.status)
    console.print(table)
    for line in _remarks(found):
        console.print(line, soft_wrap=True, markup=False)


def _remarks(found: Sequence[Diagnosis]) -> Iterator[str]:
    """Why a backend is absent or has failed, and every error that is over its limit."""
    for each in found:
        if each.reason:
            what = {"absent": "is absent", "failed": "has failed"}.get(each.status, "was checked in part")
            yield f"{each.name} {what}: {each.reason}"
        for comparison in each.comparisons:
            for name, most in comparison.limits.items():
                if not comparison.errors[name] <= most:
                    yield (
                        f"{each.name}, {comparison.normalizer} in {comparison.dtype}: {name} differs by "
                        f"{comparison.errors[name]:.2g}, and at most {most:.2g} is rounding"
                    )


def _cell(comparison: Comparison | None) -> str:
    if comparison is None:
        return "-"
    error = f"{comparison.errors['output']:.0e}"
    return error if comparison.agrees else f"[red]{error}[/red]"
