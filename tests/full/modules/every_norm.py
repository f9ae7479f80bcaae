"""Every foreign module in every form with every norm, once: takes hours, so the outcomes are archived.

.venv/bin/python -m tests.full.modules.every_norm run PART PARTS

.venv/bin/python -m tests.full.modules.every_norm write

`run` appends to build/every_norm.PART.jsonl the exports that neither that file nor the archive has. `write` adds the
parts to the archive every_norm.json beside this file, and writes the table of the page.
"""

import json
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

import sharp
from sharp.core.errors import InputError, VerificationError
from sharp.exporter.module import check_traced, evaluated, trace
from tests.full.modules.libraries import foreign_libraries
from tests.full.modules.test_foreign import DECODERS, OTHERS

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build"
ARCHIVE = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "reference" / "foreign-modules.md"
BEGIN = "<!-- Written by tests/full/modules/every_norm.py from its archive; do not edit. -->\n"
END = "<!-- End of the written part. -->\n"
FORMS = ("paged", "contiguous", "none")
LENGTH = {"w_beta": 0.02, "w_gamma": 0.01}
NORMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "fixed-temperature": {"temperature": 0.7},
    "adaptive-temperature": {},
    "ssmax": {"norm_parameters": {"s": 0.4}},
    "ssmax-bias": {"norm_parameters": {"s": 0.4, "b": 0.1}},
    "assmax": {"norm_parameters": LENGTH},
    "entmax": {},
    "sparsemax": {},
    "sentmax": {"norm_parameters": {"beta": 0.3, "gamma": 0.5}},
    "asentmax": {"norm_parameters": LENGTH | {"c_beta": 0.1}},
    "ssa": {},
    "sigmoid": {},
    "relu": {},
    "relu2": {},
}
VERIFIED = "verified"
# These norms scale the query. No norm can scale capped logits, and a scale per token needs the tensor from which the
# query is projected.
REFUSALS = ("caps its logits", "is no projection of one tensor")


def jobs() -> list[tuple[str, str, str]]:
    """Return module, form and norm of every export.

    Decoders with one form for each norm come first, which meets every pair of a module, a form and a norm early.
    """
    cases = [(name, norm, at) for at, name in enumerate(DECODERS) for norm in NORMS]
    first = [(name, FORMS[(at + list(NORMS).index(norm)) % 3], norm) for name, norm, at in cases]
    others = [(name, "none", norm) for name in OTHERS for norm in NORMS]
    rest = [(name, form, norm) for name, norm, _ in cases for form in FORMS if (name, form, norm) not in first]
    return first + others + rest


def run(part: int, parts: int) -> None:
    """Export the modules of one part."""
    path = BUILD / f"every_norm.{part}.jsonl"
    done = {*archived()}
    if path.exists():
        done |= {tuple(json.loads(line)[:3]) for line in path.read_text().splitlines()}
    names = list({**DECODERS, **OTHERS})
    program, current = None, None
    for name, form, norm in jobs():
        if names.index(name) % parts != part or (name, form, norm) in done:
            continue
        if name != current:
            torch.manual_seed(0)
            module, inputs = {**DECODERS, **OTHERS}[name]()
            with evaluated(module):
                program = trace(module, inputs)
                check_traced(module, program, inputs)
            current = name
        assert program is not None
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps((name, form, norm, outcome(program, form, norm))) + "\n")


def outcome(program: torch.export.ExportedProgram, form: str, norm: str) -> str:
    """Return the outcome of an export: verified, or the sentence of a refusal."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "model"
        try:
            sharp.export(program, norm=norm, cache=form, untrained_norm=True, output=output, **NORMS[norm])
        except (InputError, VerificationError) as error:
            return str(error)
    return VERIFIED


def archived() -> dict[tuple[str, str, str], str]:
    """Return the archived outcomes by module, form and norm."""
    return {(name, form, norm): found for name, form, norm, found in json.loads(ARCHIVE.read_text(encoding="utf-8"))}


def table() -> str:
    """Return the Markdown table of how many norms are verified, refused and failed for each module and form."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for (name, form, _), found in archived().items():
        kind = found if found == VERIFIED else "refused" if is_refusal(found) else "failed"
        counts[name, form][kind] += 1
    rows = [f"| module | {' | '.join(f'`{form}`' for form in FORMS)} |", "| --- " * 4 + "|"]
    for name in (*DECODERS, *OTHERS):
        rows.append(f"| {name} | {' | '.join(cell(counts[name, form]) for form in FORMS)} |")
    rows += ["", f"{len(archived())} of the {len(jobs())} exports were run."]
    return "\n".join(" ".join(row.split()) for row in rows) + "\n"


def is_refusal(found: str) -> bool:
    """Whether an outcome says that the norm or the form does not fit the module."""
    return any(words in found for words in REFUSALS)


def cell(found: Counter[str]) -> str:
    """Return the table's cell for one form of one module."""
    words = {VERIFIED: "verified", "refused": "refused", "failed": "failed"}
    return ", ".join(f"{found[kind]} {word}" for kind, word in words.items() if found[kind])


def write() -> None:
    """Add the parts to the archive, and put the table into the page."""
    lines = [line for path in sorted(BUILD.glob("every_norm.*.jsonl")) for line in path.read_text().splitlines()]
    outcomes = sorted((archived() | {tuple(json.loads(line)[:3]): json.loads(line)[3] for line in lines}).items())
    content = ",\n".join(json.dumps([*case, found]) for case, found in outcomes)
    ARCHIVE.write_text(f"[\n{content}\n]\n", encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write()
    else:
        with foreign_libraries():
            run(int(sys.argv[2]), int(sys.argv[3]))
