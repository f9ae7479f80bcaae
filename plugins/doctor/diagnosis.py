"""The diagnoses of `sharp doctor`: every backend of this machine compared with the float64 reference."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from rich.console import Console

from sharp.core.errors import SharpError
from sharp.core.table import Table
from sharp.plugins.doctor.backends import OpBackend, backends
from sharp.plugins.doctor.case import Case, errors, limits, make_case
from sharp.plugins.doctor.machine import describe
from sharp.plugins.op.attributes import NORMALIZERS

__all__ = ["CaseErrors", "Diagnosis", "as_json", "backends", "describe", "diagnose", "print_diagnoses"]

Status = Literal["agrees", "differs", "failed", "absent"]


@dataclass(frozen=True)
class CaseErrors:
    """The result of one case on one backend: its errors and their limits, by the same names (`case.errors`)."""

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
    """The result of all cases on a backend.

    `reason` tells why the backend is absent or has failed, or which kernel its library lacks; otherwise it is empty.
    """

    name: str
    status: Status
    reason: str
    comparisons: tuple[CaseErrors, ...]


def diagnose(backend: OpBackend) -> Diagnosis:
    """Run all cases on a backend, if it is available; no exception of the backend leaves this function.

    The status is "absent" if something is missing, "failed" if a case raised an exception, "differs" if an error is
    above its limit, otherwise "agrees". A library compiled without some kernels is not wrong: these cases are left out.
    """
    comparisons: list[CaseErrors] = []
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
    except Exception as error:  # any error of a runtime, or of a broken package, is a finding
        return Diagnosis(backend.name, "failed", f"{type(error).__name__}: {_first_line(error)}", tuple(comparisons))
    if not comparisons:
        return Diagnosis(backend.name, "absent", reason, ())
    status: Status = "agrees" if all(comparison.agrees for comparison in comparisons) else "differs"
    return Diagnosis(backend.name, status, reason, tuple(comparisons))


def _first_line(error: Exception) -> str:
    """Return the first line of the error's message; "" if the message is empty."""
    return (str(error).strip().splitlines() or [""])[0]


def _compare(backend: OpBackend, case: Case) -> CaseErrors:
    """Run the case on the backend, and return the errors against the reference with their limits."""
    return CaseErrors(case.normalizer, case.dtype, errors(case, backend.run(case)), limits(case))


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as JSON values. JSON has no NaN, so an error that is not finite becomes null."""
    written = asdict(diagnosis)
    for comparison in written["comparisons"]:
        comparison["errors"] = {n: e if math.isfinite(e) else None for n, e in comparison["errors"].items()}
    return written


def print_diagnoses(machine: dict[str, str], found: Sequence[Diagnosis]) -> None:
    """Print tables, and a line for everything that is not as it should be, on stdout; `machine` is from `describe`."""
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    table = Table(show_header=False, box=None)
    for name, value in machine.items():
        table.add_row(name, value)
    console.print(table)
    table = Table(title="Largest error of the output beside the float64 reference", title_justify="left")
    for column in ("backend", "type", *NORMALIZERS, ""):
        table.add_column(column, justify="right" if column in NORMALIZERS else "left")
    for diagnosis in found:
        for number, dtype in enumerate(dict.fromkeys(c.dtype for c in diagnosis.comparisons)):
            by_normalizer = {c.normalizer: c for c in diagnosis.comparisons if c.dtype == dtype}
            cells = [_cell(by_normalizer.get(normalizer)) for normalizer in NORMALIZERS]
            table.add_row(diagnosis.name if number == 0 else "", dtype, *cells, diagnosis.status if number == 0 else "")
        if not diagnosis.comparisons:
            table.add_row(diagnosis.name, "", *("" for _ in NORMALIZERS), diagnosis.status)
    console.print(table)
    for line in _remarks(found):
        console.print(line, soft_wrap=True, markup=False)


def _remarks(found: Sequence[Diagnosis]) -> Iterator[str]:
    """Yield why a backend is absent or has failed, and every error above its limit."""
    for diagnosis in found:
        if diagnosis.reason:
            what = {"absent": "is absent", "failed": "has failed"}.get(diagnosis.status, "was checked in part")
            yield f"{diagnosis.name} {what}: {diagnosis.reason}"
        for comparison in diagnosis.comparisons:
            for name, most in comparison.limits.items():
                if not comparison.errors[name] <= most:
                    yield (
                        f"{diagnosis.name}, {comparison.normalizer} in {comparison.dtype}: {name} differs by "
                        f"{comparison.errors[name]:.2g}, and at most {most:.2g} is rounding"
                    )


def _cell(comparison: CaseErrors | None) -> str:
    """Return the table cell of a comparison: the error of `output`, in red if it exceeds its limit; "-" for None."""
    if comparison is None:
        return "-"
    error = f"{comparison.errors['output']:.0e}"
    return error if comparison.agrees else f"[red]{error}[/red]"
