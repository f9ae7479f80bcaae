"""Names, defaults and checks of the ops' attributes, read from `definition.py`, without the onnx package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from sharp.core.errors import InputError
from sharp.plugins.op import definition
from sharp.plugins.op.definition import ICML2025_COEFFICIENTS as ICML2025_COEFFICIENTS
from sharp.plugins.op.definition import MOST_COEFFICIENTS, Attribute
from sharp.plugins.op.definition import SCALED_CACHES as SCALED_CACHES

NORMALIZERS = tuple(normalizer.name for normalizer in definition.NORMALIZERS)

HEAD_PARAMETERS: dict[str, tuple[str, ...]] = {
    normalizer.name: tuple(column.name for column in normalizer.columns)
    for normalizer in definition.NORMALIZERS
    if normalizer.columns
}
"""Each normalizer's own columns of `head_params`. A sink, if there is one, is one more column behind its own columns.

`power` p scales with the number n of visible keys: bias - p ln n is added to sigmoid's logits, and the weights of relu
and relu2 are divided by n^p.
"""

SPARSE = tuple(normalizer.name for normalizer in definition.NORMALIZERS if normalizer.sparse)
"""Normalizers in which a visible key can have the weight 0."""

WITHOUT_SINK = tuple(normalizer.name for normalizer in definition.NORMALIZERS if not normalizer.competes)
"""Normalizers whose weight follows from one logit alone. Keys do not compete, so a sink would change nothing.

The columns of `head_params` of these normalizers may be left out; the number of visible keys then changes nothing.
"""


def has_place_for_sink(normalizer: str) -> bool:
    """Whether a sink can take part under the normalizer of this name.

    The normalizer's keys must compete. A user's normalizer, like an unknown name, has no place for a sink.
    """
    return normalizer in NORMALIZERS and normalizer not in WITHOUT_SINK


# The published polynomials by name: ICML 2025 Fig. 4 (icml2025), and the earlier arXiv version of the same paper
# (arxiv2024). icml2025-long is ours, for long contexts: a least-squares fit over 0.5 to 12.5 nats (the entropy of
# 262,144 equal keys) to icml2025 up to its maximum at 4.4 nats and to that maximum beyond. The fit is off by at most
# 0.05 and has as many terms as kernels take.
TEMPERATURE_PRESETS: dict[str, tuple[float, ...]] = {
    "icml2025": ICML2025_COEFFICIENTS,
    "arxiv2024": (-0.04, 0.48, -2.3, 4.92, -1.79),
    "icml2025-long": (
        *(1.11228e-05, -5.547786e-04, 1.1342129e-02, -0.12260920),
        *(0.75466257, -2.6540456, 5.0371518, -1.7651594),
    ),
}

ATTRIBUTES: dict[str, Attribute] = {attribute.name: attribute for attribute in definition.ATTRIBUTES}
REQUIRED_ATTRIBUTES = tuple(name for name, attribute in ATTRIBUTES.items() if attribute.default is None)
ATTRIBUTE_DEFAULTS: dict[str, definition.Default] = {
    name: attribute.default for name, attribute in ATTRIBUTES.items() if attribute.default is not None
}


def _default_of(name: str) -> float:
    """Return the default of a numeric attribute of the op."""
    default = ATTRIBUTE_DEFAULTS[name]
    assert isinstance(default, int | float)
    return default


DEFAULT_ALPHA = _default_of("alpha")
DEFAULT_ENTROPY_THRESHOLD = _default_of("entropy_threshold")
DEFAULT_STATS_COLUMNS = int(_default_of("stats_columns"))
"""Columns of `stats`: entropy, support, inverse temperature, logit spread."""
STATS_COLUMNS_WITH_SINK = 5
"""Columns of `stats` with the sink's mass: entropy, support, inverse temperature, logit spread, sink mass."""


class AttributeValues(TypedDict, total=False):
    """Attributes of a call by name; `normalizer` and `scale` must be given."""

    normalizer: str
    scale: float
    alpha: float
    temperature_coefficients: Sequence[float] | None
    entropy_threshold: float
    softcap: float
    window: int
    causal: bool
    key_bound: float
    stats_columns: int


@dataclass(frozen=True)
class Attributes:
    """The attributes of one call, checked. `temperature_coefficients` None or left out means the default coefficients.

    Raises:
        InputError: the normalizer is unknown (neither Sharp's nor a user's), or a number is outside its limits. The
            limits of the GPU kernels are not checked.
    """

    normalizer: str
    scale: float
    alpha: float = DEFAULT_ALPHA
    temperature_coefficients: Sequence[float] | None = ICML2025_COEFFICIENTS
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD
    softcap: float = 0.0
    window: int = -1
    causal: bool = True
    key_bound: float = 0.0
    stats_columns: int = DEFAULT_STATS_COLUMNS

    def __post_init__(self) -> None:
        check_attributes({field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients of the inverse temperature, highest power first."""
        given = self.temperature_coefficients
        return ICML2025_COEFFICIENTS if given is None else tuple(given)


def check_attributes(values: Mapping[str, Any], *, gpu: bool = False) -> None:
    """Check the attributes in `values`, by name; ignore names that the ops do not have.

    Args:
        values: the attributes as Python values. `normalizer` may be a user's; a value that is None or left out is not
            checked. Without `normalizer`, the limits that hold for one normalizer only are not checked.
        gpu: whether to check the limits of the GPU kernels, too.

    Raises:
        InputError: the normalizer is unknown, there are too few or too many temperature coefficients, or a number is
            outside its limits.
    """
    # Imported here, because custom_normalizer needs NORMALIZERS.
    from sharp.plugins.op.custom_normalizer import is_custom

    normalizer = values.get("normalizer")
    if normalizer is not None and normalizer not in NORMALIZERS and not is_custom(normalizer):
        raise InputError(f"normalizer is {normalizer!r}; it must be one of {', '.join(NORMALIZERS)}")
    coefficients = values.get("temperature_coefficients")
    if coefficients is not None and not 1 <= len(coefficients) <= MOST_COEFFICIENTS:
        raise InputError(
            f"attribute temperature_coefficients has {len(coefficients)} numbers; it must have 1 to {MOST_COEFFICIENTS}"
        )
    for name, attribute in ATTRIBUTES.items():
        if (value := values.get(name)) is None:
            continue
        for limits in attribute.limits:
            if limits.normalizer in ("", normalizer) and (gpu or not limits.gpu) and not limits.allow(value):
                raise InputError(f"attribute {name} is {value:g}; it must be {limits.rule}")


def head_params_mistake(normalizer: str, columns: int | None) -> str | None:
    """Return a sentence that says what is wrong with `head_params` of `columns` columns, or None if nothing is wrong.

    `columns` None means that `head_params` is left out. A normalizer that Sharp does not have is taken for a user's,
    which takes no `head_params`.
    """
    own = HEAD_PARAMETERS.get(normalizer, ())
    if columns is not None and normalizer not in NORMALIZERS:
        return f"head_params has {columns} columns; {normalizer} takes none: leave it out"
    if columns is None:
        if not own or normalizer in WITHOUT_SINK:
            return None
        return f"{normalizer} needs head_params [q_heads, {len(own)}]: {' and '.join(own)} of every head"
    if columns == len(own) or (columns == len(own) + 1 and normalizer not in WITHOUT_SINK):
        return None
    if normalizer in WITHOUT_SINK:
        return (
            f"head_params has {columns} columns; {normalizer} takes {len(own)} ({', '.join(own)}) and no sink: "
            "give it these, or leave it out"
        )
    allowed = f"{len(own)} ({', '.join(own)}) or {len(own) + 1} (the sink behind them)" if own else "1 (the sink)"
    return f"head_params has {columns} columns; {normalizer} takes {allowed}"
