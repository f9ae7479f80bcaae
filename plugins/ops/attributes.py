"""Names and defaults of the ops' attributes, for code that runs where onnx is not installed, such as a GPU machine."""

from sharp.plugins.errors import InputError

NORMALIZERS = ("softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid", "relu", "relu2", "softpick")

HEAD_PARAMETERS: dict[str, tuple[str, ...]] = {
    "ssa": ("b", "n"),
    "sigmoid": ("bias", "power"),
    "relu": ("power",),
    "relu2": ("power",),
}
"""The columns of `head_params` that a normalizer has of its own; a sink is one more behind them.

`power` p says what the number n of visible keys does: bias - p ln n is added to sigmoid's logits, the weights of relu
and relu2 are divided by n^p.
"""

SPARSE = ("entmax", "relu", "relu2", "softpick")
"""Normalizers in which a visible key can have the weight 0."""

WITHOUT_SINK = ("sigmoid", "relu", "relu2")
"""Normalizers that make a weight of one logit: their keys do not compete, so a sink would change nothing.

Their own columns of `head_params` may be left out; n then changes nothing.
"""


def has_place_for_sink(normalizer: str) -> bool:
    """Whether a sink can take part: keys must compete, and a user's normalizer sees keys only."""
    return normalizer in NORMALIZERS and normalizer not in WITHOUT_SINK


ICML2025_COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)
"""Inverse temperature as a polynomial of the entropy in nats, highest power first (ICML 2025, Fig. 4)."""

# The published polynomials by name: ICML 2025 Fig. 4, and the earlier arXiv version of the same paper. Then ours for
# long contexts: the first up to 4.4 nats, where it is largest, and that value from there to 12.5 nats, which 262,144
# equal keys have. Least squares over 0.5 to 12.5 nats, off by 0.05 at most, of as many terms as the GPU kernels take.
TEMPERATURE_PRESETS: dict[str, tuple[float, ...]] = {
    "icml2025": ICML2025_COEFFICIENTS,
    "arxiv2024": (-0.04, 0.48, -2.3, 4.92, -1.79),
    "icml2025-long": (
        *(1.11228e-05, -5.547786e-04, 1.1342129e-02, -0.12260920),
        *(0.75466257, -2.6540456, 5.0371518, -1.7651594),
    ),
}

DEFAULT_STATS_COLUMNS = 4
"""Columns of `stats`: entropy, support, inverse temperature, logit spread."""
STATS_COLUMNS_WITH_SINK = 5
"""Those, and the sink's mass."""

DEFAULT_ALPHA = 1.5
DEFAULT_ENTROPY_THRESHOLD = 0.5


def check_stats_columns(columns: int) -> None:
    """Raises InputError where the attribute `stats_columns` has another value than it may have."""
    if columns not in (DEFAULT_STATS_COLUMNS, STATS_COLUMNS_WITH_SINK):
        raise InputError(f"stats_columns is {columns}; it must be 4, or 5 with the sink's mass")


def head_params_mistake(normalizer: str, columns: int | None) -> str | None:
    """What is wrong with `head_params` of so many columns, None where it is left out; None if nothing is."""
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


SCALED_CACHES = ("int8", "fp8")  # types of caches whose numbers stand for themselves times their block's scale
