"""Names and defaults of the ops' attributes, for code that runs where onnx is not installed, such as a GPU machine."""

NORMALIZERS = ("softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid", "relu", "relu2")

ICML2025_COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)
"""Inverse temperature as a polynomial of the entropy in nats, highest power first (ICML 2025, Fig. 4)."""

# The published polynomials by name: ICML 2025 Fig. 4, and the earlier arXiv version of the same paper.
TEMPERATURE_PRESETS: dict[str, tuple[float, ...]] = {
    "icml2025": ICML2025_COEFFICIENTS,
    "arxiv2024": (-0.04, 0.48, -2.3, 4.92, -1.79),
}

DEFAULT_ALPHA = 1.5
DEFAULT_ENTROPY_THRESHOLD = 0.5
