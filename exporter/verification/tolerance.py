"""The tolerances of verification, which depend on the precision that the model was written in."""

import math
from dataclasses import dataclass, replace

from sharp.exporter.graph.graph_options import GraphOptions
from sharp.exporter.verification.comparison import FLOAT32, Difference


@dataclass(frozen=True)
class ExportTolerance:
    """The largest differences from PyTorch that pass: `difference` in every case, `perplexity` relative, on a text.

    `between_runtimes` is set for quantized models. Their perplexity in the first runtime may also fall below PyTorch's
    by any amount. The perplexity in other runtimes is compared with the first runtime. Standard ops can read a short
    text only, on which a comparison of quantized with exact weights says little.
    """

    difference: Difference
    perplexity: float
    between_runtimes: float | None = None


PLAIN = ExportTolerance(FLOAT32, perplexity=1e-3)
# Quantized products round activations to 8 bits, so a difference in the last bit of a sum can become a whole step. The
# perplexity of SmolLM2 in int4 differed by 0.5 % between runtimes on 255 tokens.
BETWEEN_RUNTIMES = 2e-2
# A type of less precision changes single logits and the entropies of sharp heads by much, but their means and the
# perplexity of a text by little, because errors have both signs. The bounds are about twice the largest errors of
# SmolLM2 in the verifier's cases (caches: 2026-11-27):
#                 logits   entropies   cached   mean logits   mean entropies
#   int8 weights  0.22     0.73 nats            0.013         0.035 nats
#   int4 weights  0.45     1.8 nats             0.054         0.11 nats
#   int8 cache    0.12     0.7 nats    0.22     0.013         0.05 nats
#   fp8 cache     0.24     1.2 nats    0.42     0.018         0.07 nats
# In float16, a cached value of SmolLM2 differed by 0.018 of the largest. The bound of int4's perplexity is the target.
OF_PRECISION = {
    "float32": PLAIN,
    "float16": ExportTolerance(Difference(logits=1e-2, entropy=5e-2, cached=4e-2), perplexity=5e-3),
    "bfloat16": ExportTolerance(Difference(logits=8e-2, entropy=0.3, cached=0.1), perplexity=2e-2),
    "fp8 cache": ExportTolerance(
        Difference(0.5, 2.5, cached=0.9, mean_logits=0.04, mean_entropy=0.15), perplexity=6e-2
    ),
    "int8 cache": ExportTolerance(
        Difference(0.25, 1.5, cached=0.5, mean_logits=0.03, mean_entropy=0.1), perplexity=2e-2
    ),
    "int8": ExportTolerance(Difference(0.5, 2.0, cached=0.5, mean_logits=0.03, mean_entropy=0.08), perplexity=1e-2),
    "int4": ExportTolerance(Difference(0.9, 4.0, cached=0.9, mean_logits=0.12, mean_entropy=0.3), perplexity=0.08),
}
# int4-128 has fewer scales and no zero points. SmolLM2's perplexity is 8.5 % above that of the checkpoint, whose
# weights have 4 bits, too.
OF_PRECISION["int4-128"] = replace(OF_PRECISION["int4"], perplexity=0.17)
# In a Mixture of Experts, rounding changes which experts a token chooses if two are nearly as good. Then this token,
# and all tokens that attend to it, differ by much in any precision, so means decide. Random models with 2 of 4 experts
# in bfloat16, float16 and int8 (30 exports, 2026-11-27) differed by up to 0.47 of the largest logit and 0.6 of the
# largest cached value; the means were up to 0.02 and 0.01 nats.
# Under entmax, rounding changes whether a key near the threshold has a weight. SmolLM2 adapted to entmax differed in
# int8 by 0.53 of the largest logit and 0.95 of a cached value in 2 of 34 cases, with means of 0.013 and 0.028 nats.
ROUTED = Difference(1.0, 4.0, cached=1.0, mean_logits=0.03, mean_entropy=0.08)


def tolerance_of(options: GraphOptions, *, quantized: bool, stepwise: bool = False) -> ExportTolerance:
    """Return the tolerance of a model written with `options`, before or after it was quantized.

    `stepwise` says that rounding may change a choice: of the experts of a token or, with quantized weights, of the keys
    that have a weight.
    """
    found = _of_precision(options, quantized=quantized)
    if not stepwise or found == PLAIN:
        return found
    means = found.difference if found.difference.mean_logits < math.inf else ROUTED
    difference = replace(ROUTED, mean_logits=means.mean_logits, mean_entropy=means.mean_entropy)
    return replace(found, difference=difference)


def _of_precision(options: GraphOptions, *, quantized: bool) -> ExportTolerance:
    """Return the tolerance of the export's dtype, cache and quantization: the largest of their limits.

    `quantized` says whether weights are compared quantized.
    """
    cache = f"{options.kv_dtype} cache" if options.scaled else options.cache_dtype
    parts = [OF_PRECISION[options.dtype], OF_PRECISION[cache]]
    if quantized and options.quantize is not None:
        parts.append(OF_PRECISION[options.quantize])
    perplexity = max(part.perplexity for part in parts)
    differences = [part.difference for part in parts]
    logits, entropy, cached = (
        max(getattr(difference, name) for difference in differences) for name in ("logits", "entropy", "cached")
    )
    known = [difference for difference in differences if difference.mean_logits < math.inf]
    means = (
        max((getattr(difference, name) for difference in known), default=math.inf)
        for name in ("mean_logits", "mean_entropy")
    )
    return ExportTolerance(
        Difference(logits, entropy, cached, *means), perplexity, BETWEEN_RUNTIMES if len(parts) == 3 else None
    )
