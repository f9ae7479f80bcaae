"""`report.json` of a model folder: what verification found, check by check."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.exporter.checkpoints.source import Source
from sharp.exporter.forms.form import Form
from sharp.exporter.verification.comparison import Comparison, Shape
from sharp.exporter.verification.perplexity import Perplexity
from sharp.exporter.verification.tolerance import Tolerance
from sharp.exporter.verification.verifier import ROUNDING_FACTOR, Verification
from sharp.plugins import manifest

REPORT_FILE = "report.json"
REPORT_VERSION = "2.1"


def verification_report(
    source: Source,
    form: Form,
    target: str,
    verification: Verification,
    perplexity: Perplexity | None,
    tolerance: Tolerance,
) -> dict[str, Any]:
    """The report as JSON has it.

    Errors of logits are relative to the largest logit of the case in PyTorch, those of cached keys and values to the
    largest number of their cache, those of entropies are in nats. `lengths` of a case are the tokens that every
    sequence of its batch has in the last step, `contexts` those in the cache before it; the rows of both are compared.
    A case with `torch_rounding` is compared with PyTorch in float64, and has there what PyTorch in float32 differs by.
    """
    report = {
        "format_version": REPORT_VERSION,
        "passed": verification.passed,
        "failure": verification.failure,
        "first_wrong_layer": verification.first_wrong_layer,
        "source": {"name": source.name, "architecture": source.architecture, "sha256": source.sha256},
        "norm": form.config.norm,
        "trained_norm": source.original.config.norm,
        "cache": form.cache.form,
        "target": target,
        "tolerance": {
            **asdict(tolerance.difference),
            "rounding_factor": ROUNDING_FACTOR,
            "perplexity": tolerance.perplexity,
        },
        "cases": [_case(comparison, verification.shapes[comparison.case]) for comparison in verification.comparisons],
        "heads": _heads(verification.comparisons),
        "greedy": [{**asdict(one), "passed": one.passed} for one in verification.continuations],
        "perplexity": None
        if perplexity is None
        else {
            **asdict(perplexity),
            "runtimes": [{**asdict(one), "passed": one.passed} for one in verification.predictions],
        },
    }
    return {name: _as_json(value) for name, value in report.items()}


def summary(verification: Verification, perplexity: Perplexity | None) -> manifest.VerificationSummary:
    """What `sharp.json` has of the report."""
    return {
        "passed": verification.passed,
        "comparisons": [
            {
                "runtime": one.runtime,
                "case": one.case,
                "rows": one.rows,
                "logits_error": one.logits_error,
                "logits_tolerance": one.tolerance.logits,
                "entropy_error": one.entropy_error,
                "entropy_tolerance": one.tolerance.entropy,
                "same_greedy": one.same_greedy,
            }
            for one in verification.comparisons
        ],
        "greedy": [
            {"runtime": one.runtime, "tokens": one.tokens, "same": one.same} for one in verification.continuations
        ],
        "perplexity": None
        if perplexity is None
        else manifest.TextPerplexity(
            text=perplexity.text,
            tokens=perplexity.tokens,
            trained_norm=perplexity.trained_norm,
            norm=perplexity.norm,
            before=perplexity.before,
            after=perplexity.after,
            runtimes={one.runtime: one.perplexity for one in verification.predictions},
        ),
    }


def _case(comparison: Comparison, shapes: Sequence[Shape]) -> dict[str, Any]:
    return {
        "runtime": comparison.runtime,
        "case": comparison.case,
        "batch": len(shapes),
        "lengths": [shape.tokens for shape in shapes],
        "contexts": [shape.context for shape in shapes],
        "rows": comparison.rows,
        "passed": comparison.passed,
        "tolerance": asdict(comparison.tolerance),
        "torch_rounding": None if comparison.rounding is None else asdict(comparison.rounding),
        "logits": {"max_error": comparison.logits_error, "mean_error": comparison.mean_logits_error},
        "entropy": {
            "max_error": comparison.entropy_error,
            "mean_error": comparison.mean_entropy_error,
            "max_error_of_layers": comparison.layer_entropy_errors,
        },
        **{name: {"max_error": one.largest, "mean_error": one.mean} for name, one in comparison.cached.items()},
        "same_greedy": comparison.same_greedy,
    }


def _heads(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Per runtime, over all cases: every head's mean entropy in PyTorch and there, and the largest difference."""
    found: list[dict[str, Any]] = []
    for runtime in dict.fromkeys(comparison.runtime for comparison in comparisons):
        heads = [comparison.heads for comparison in comparisons if comparison.runtime == runtime]
        rows = sum(one.rows for one in heads)
        found.append(
            {
                "runtime": runtime,
                "mean_entropy": _rounded(np.sum([one.actual for one in heads], axis=0) / rows),
                "torch_mean_entropy": _rounded(np.sum([one.expected for one in heads], axis=0) / rows),
                "max_error": _rounded(np.max([one.error for one in heads], axis=0)),
            }
        )
    return found


def _as_json(value: Any) -> Any:
    """`value` with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(matrix: NDArray[np.float64]) -> list[list[float]]:
    """[layers][heads] with six digits."""
    return [[float(f"{value:.6g}") for value in row] for row in matrix.tolist()]
