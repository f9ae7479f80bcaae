"""The file `report.json` of a model folder, with the result of every check of the verification."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.core import manifest
from sharp.exporter.sources.source import Source
from sharp.exporter.verification.comparison import CaseComparison, CaseShape
from sharp.exporter.verification.perplexity import Perplexity
from sharp.exporter.verification.tolerance import ExportTolerance
from sharp.exporter.verification.verifier import ROUNDING_FACTOR, Verification

REPORT_FILE = "report.json"
REPORT_VERSION = "2.2"


def verification_report(
    source: Source,
    norm: str,
    cache: str,
    target: str,
    verification: Verification,
    perplexity: Perplexity | None,
    tolerance: ExportTolerance,
    against: str,
) -> dict[str, Any]:
    """Return the report as JSON values; numbers that are not finite are None.

    Errors of logits are relative to the largest logit of the case in PyTorch, errors of cached keys and values to the
    largest number of their cache, and errors of entropies are in nats. `lengths` of a case has the tokens that every
    sequence has in the last step, and `contexts` the tokens in the cache before that step; the rows of both are
    compared. `unused` has the names in each file of the checkpoint that the export left out. `checked_against` is a
    line for people, which says what PyTorch ran and what no second reader has checked. A case with `torch_rounding` is
    compared with PyTorch in float64; `torch_rounding` has the differences of PyTorch in float32 from that.
    """
    report = {
        "format_version": REPORT_VERSION,
        "passed": verification.passed,
        "failure": verification.failure,
        "checked_against": against,
        "first_wrong_layer": verification.first_wrong_layer,
        "source": {"name": source.name, "architecture": source.architecture, "sha256": source.sha256},
        "warnings": list(source.warnings),
        "unused": {
            unused.place: {"unknown": unused.unknown, "ignored": unused.ignored}
            for unused in source.unused
            if unused.unknown or unused.ignored
        },
        "tokens_beyond_the_model": {str(token_id): text for token_id, text in source.tokens_beyond.items()},
        "norm": norm,
        "trained_norm": source.original.config.norm,
        "cache": cache,
        "target": target,
        "tolerance": {
            **asdict(tolerance.difference),
            "rounding_factor": ROUNDING_FACTOR,
            "perplexity": tolerance.perplexity,
        },
        "cases": [_case(comparison, verification.shapes[comparison.case]) for comparison in verification.comparisons],
        "heads": _heads(verification.comparisons),
        "greedy": [
            {**asdict(continuation), "passed": continuation.passed} for continuation in verification.continuations
        ],
        "perplexity": None
        if perplexity is None
        else {
            **asdict(perplexity),
            "runtimes": [
                {**asdict(prediction), "passed": prediction.passed} for prediction in verification.predictions
            ],
        },
    }
    return {name: _as_json(value) for name, value in report.items()}


def summary(verification: Verification, perplexity: Perplexity | None) -> manifest.VerificationSummary:
    """Return the summary of the report that the manifest `sharp.json` has."""
    return {
        "passed": verification.passed,
        "comparisons": [
            {
                "runtime": comparison.runtime,
                "case": comparison.case,
                "rows": comparison.rows,
                "logits_error": comparison.logits_error,
                "logits_tolerance": comparison.tolerance.logits,
                "entropy_error": comparison.entropy_error,
                "entropy_tolerance": comparison.tolerance.entropy,
                "same_greedy": comparison.same_greedy,
            }
            for comparison in verification.comparisons
        ],
        "greedy": [
            {"runtime": continuation.runtime, "tokens": continuation.tokens, "same": continuation.same}
            for continuation in verification.continuations
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
            runtimes={prediction.runtime: prediction.perplexity for prediction in verification.predictions},
        ),
    }


def _case(comparison: CaseComparison, shapes: Sequence[CaseShape]) -> dict[str, Any]:
    """Return the JSON object of a comparison in the export's report; `shapes` are the sequences of its batch."""
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
        **{name: {"max_error": error.largest, "mean_error": error.mean} for name, error in comparison.cached.items()},
        "same_greedy": comparison.same_greedy,
    }


def _heads(comparisons: Sequence[CaseComparison]) -> list[dict[str, Any]]:
    """Return, for each runtime, the mean entropy of every head there and in PyTorch, and their largest difference."""
    found: list[dict[str, Any]] = []
    for runtime in dict.fromkeys(comparison.runtime for comparison in comparisons):
        heads = [comparison.heads for comparison in comparisons if comparison.runtime == runtime]
        rows = sum(entropies.rows for entropies in heads)
        found.append(
            {
                "runtime": runtime,
                "mean_entropy": _rounded(np.sum([entropies.actual for entropies in heads], axis=0) / rows),
                "torch_mean_entropy": _rounded(np.sum([entropies.expected for entropies in heads], axis=0) / rows),
                "max_error": _rounded(np.max([entropies.error for entropies in heads], axis=0)),
            }
        )
    return found


def _as_json(value: Any) -> Any:
    """Return `value` with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _as_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(matrix: NDArray[np.float64]) -> list[list[float]]:
    """Return a matrix [layers, heads] as lists of numbers with six significant digits."""
    return [[float(f"{value:.6g}") for value in row] for row in matrix.tolist()]
