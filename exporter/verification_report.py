"""`report.json` of a model folder: what verification found, case by case."""

from dataclasses import asdict
from typing import Any

from sharp.exporter.forms import Form
from sharp.exporter.perplexity import Perplexity
from sharp.exporter.source import Source
from sharp.exporter.verification import ENTROPY_TOLERANCE, LOGITS_TOLERANCE, Comparison

REPORT_FILE = "report.json"
REPORT_VERSION = "1.0"


def verification_report(
    source: Source, form: Form, target: str, comparisons: tuple[Comparison, ...], perplexity: Perplexity | None
) -> dict[str, Any]:
    """The report as JSON has it.

    Errors of logits are relative to the largest logit of the case in PyTorch, those of entropies are in nats.
    """
    return {
        "format_version": REPORT_VERSION,
        "passed": all(comparison.passed for comparison in comparisons),
        "source": {"name": source.name, "architecture": source.architecture, "sha256": source.sha256},
        "norm": form.config.norm,
        "trained_norm": source.original.config.norm,
        "cache": form.cache.form,
        "target": target,
        "tolerance": {"logits": LOGITS_TOLERANCE, "entropy": ENTROPY_TOLERANCE},
        "cases": [_case(comparison) for comparison in comparisons],
        "perplexity": None if perplexity is None else asdict(perplexity),
    }


def _case(comparison: Comparison) -> dict[str, Any]:
    return {
        "runtime": comparison.runtime,
        "case": comparison.case,
        "rows": comparison.rows,
        "passed": comparison.passed,
        "logits": {"max_error": comparison.logits_error, "mean_error": comparison.mean_logits_error},
        "entropy": {
            "max_error": comparison.entropy_error,
            "mean_error": comparison.mean_entropy_error,
            "max_error_of_layers": comparison.layer_entropy_errors,
        },
        "same_greedy": comparison.same_greedy,
    }
