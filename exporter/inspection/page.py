"""The HTML page of an inspection, one file that fetches nothing."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sharp.exporter.inspection.attention_map import AttentionMap
from sharp.exporter.inspection.heads import entropy_curves
from sharp.exporter.inspection.inspection import Inspection
from sharp.exporter.inspection.pictures import SMALLEST_WEIGHT
from sharp.exporter.inspection.table import head_rows

PAGE_FILE = "index.html"
TEMPLATE = "page.html.jinja"
STEPS = 2**16 - 1  # a weight is stored in 16 bits, as a share of the largest one


def write_page(inspection: Inspection, folder: Path) -> Path:
    """Write `index.html` into `folder`, which must exist, and return its path."""
    # FileSystemLoader, because PackageLoader does not find data files of an editable install.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    path = folder / PAGE_FILE
    html = environment.get_template(TEMPLATE).render(**page_content(inspection))
    path.write_text(html, encoding="utf-8", errors="replace")
    return path


def page_content(inspection: Inspection) -> dict[str, Any]:
    """Return the variables of the template page.html.jinja, by name."""
    statistics, model = inspection.statistics, inspection.model
    rows = head_rows(statistics)
    return {
        "model": model,
        "described": inspection.text.described,
        "tokens": statistics.tokens,
        "adaptive": model.norm == "adaptive-temperature",
        "sinks": statistics.sink is not None,
        "length_scales": statistics.length_scale is not None,
        "rows": rows,
        "bounded": statistics.bound is not None,
        "heat_maps": (
            ("Entropy / ln n", statistics.normalized_entropy.tolist()),
            ("Support / n", statistics.support_share.tolist()),
        ),
        "maps": inspection.maps,
        "data": _script_data(inspection),
    }


def _script_data(inspection: Inspection) -> dict[str, Any]:
    """Return the data of the page's script as JSON values: entropy curves, tokens of the text and packed maps."""
    statistics, model = inspection.statistics, inspection.model
    curves = entropy_curves(statistics)
    trained = model.trained_context
    return {
        "length": curves.length.round(1).tolist(),
        "uniform": curves.uniform.round(4).tolist(),
        "entropy": curves.entropy.round(4).tolist(),
        "trained": trained if trained < statistics.tokens else None,
        "first": inspection.maps[0].layer,
        "pieces": inspection.text.pieces,
        "smallest": SMALLEST_WEIGHT,
        "maps": [_packed(attention_map) for attention_map in inspection.maps],
    }


def _packed(one: AttentionMap) -> dict[str, Any]:
    """Encode a map in 16 bits, with only the keys up to each query; weights above 0 are not rounded to 0."""
    peak = float(one.weights.max()) or 1.0
    steps = np.ceil(one.weights / peak * STEPS).astype("<u2")
    kept = np.arange(steps.shape[1]) <= (one.queries // one.group)[:, None]
    return {
        "group": one.group,
        "queries": one.queries.tolist(),
        "peak": peak,
        "steps": base64.b64encode(steps[kept].tobytes()).decode(),
    }
