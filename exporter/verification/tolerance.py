"""What a written model may differ by, from the precision that it was written in."""

import math
from dataclasses import dataclass, replace

from sharp.exporter.graph.graph_options import GraphOptions
from sharp.exporter.verification.comparison import FLOAT32, Difference


@dataclass(frozen=True)
class Tolerance:
    """Of logits and entropies in every case, and of the perplexity of a text, relative to PyTorch's in float32.

    A quantized model's perplexity may also fall, and `between_runtimes` is that of its other runtimes, relative to the
    first: a short text, which is all that standard ops can read, says little about quantized against exact weights.
    """

    difference: Difference
    perplexity: float
    between_runtimes: float | None = None


PLAIN = Tolerance(FLOAT32, perplexity=1e-3)
# Quantized products round activations to 8 bits, which turns the last bit of a sum into a step: SmolLM2 in int4
# differed by 0.5 % on 255 tokens.
BETWEEN_RUNTIMES = 2e-2
# A type of less precision moves single logits and the entropies of sharp heads by much, but their means and the
# perplexity of a text by little: errors are both ways. Of SmolLM2 the largest errors of logits were 0.22 in int8 and
# 0.45 in int4, and 0.73 and 1.8 nats of entropies; the means of a case up to 0.013 and 0.054, and 0.035 and 0.11 nats.
# The bounds are about twice that. int4's perplexity is what is asked of it. In float16 a value in a cache of SmolLM2
# was off by 0.018 of the largest. Caches of 8 bits are judged by means, too: of SmolLM2 over int8 and fp8 the largest
# errors were 0.12 and 0.24 of logits, 0.7 and 1.2 nats, 0.22 and 0.42 of what is cached, and the means of a case up to
# 0.013 and 0.018, 0.05 and 0.07 nats (the verifier's cases, 2026-11-27).
OF_PRECISION = {
    "float32": PLAIN,
    "float16": Tolerance(Difference(logits=1e-2, entropy=5e-2, cached=4e-2), perplexity=5e-3),
    "bfloat16": Tolerance(Difference(logits=8e-2, entropy=0.3, cached=0.1), perplexity=2e-2),
    "fp8 cache": Tolerance(Difference(0.5, 2.5, cached=0.9, mean_logits=0.04, mean_entropy=0.15), perplexity=6e-2),
    "int8 cache": Tolerance(Difference(0.25, 1.5, cached=0.5, mean_logits=0.03, mean_entropy=0.1), perplexity=2e-2),
    "int8": Tolerance(Difference(0.5, 2.0, cached=0.5, mean_logits=0.03, mean_entropy=0.08), perplexity=1e-2),
    "int4": Tolerance(Difference(0.9, 4.0, cached=0.9, mean_logits=0.12, mean_entropy=0.3), perplexity=0.08),
}
# Fewer scales and no zero points: SmolLM2's perplexity is 8.5 % above that of its own weights, which have 4 bits, too.
OF_PRECISION["int4-128"] = replace(OF_PRECISION["int4"], perplexity=0.17)
# Where a token chooses its experts (Mixture of Experts), rounding turns the choice wherever two are nearly as good:
# then single tokens differ by much, whatever the precision, and so do those that attend to them. Random models of 2 of
# 4 experts in bfloat16, float16 and int8 (30 exports, 2026-11-27): logits by up to 0.47 of the largest, caches by 0.6,
# means by up to 0.02 and 0.01 nats. So means decide.
# So it is where a key near the threshold has a weight or none (entmax): SmolLM2 adapted to it differed in int8 by 0.53
# of the largest logit and 0.95 of a cached value in 2 of 34 cases, with means of 0.013 and 0.028 nats.
ROUTED = Difference(1.0, 4.0, cached=1.0, mean_logits=0.03, mean_entropy=0.08)


def tolerance_of(options: GraphOptions, *, quantized: bool, stepwise: bool = False) -> Tolerance:
    """The tolerance of a model written with `options`, before or after it was quantized.

    `stepwise` says that a rounding may turn a choice: of a token's experts or, under quantized weights, of the keys
    that have a weight.
    """
    found = _of_precision(options, quantized=quantized)
    if not stepwise or found == PLAIN:
        return found
    means = found.difference if found.difference.mean_logits < math.inf else ROUTED
    difference = replace(ROUTED, mean_logits=means.mean_logits, mean_entropy=means.mean_entropy)
    return replace(found, difference=difference)


def _of_precision(options: GraphOptions, *, quantized: bool) -> Tolerance:
    cache = f"{options.kv_dtype} cache" if options.scaled else options.cache_dtype
    parts = [OF_PRECISION[options.dtype], OF_PRECISION[cache]]
    if quantized and options.quantize is not None:
        parts.append(OF_PRECISION[options.quantize])
    perplexity = max(part.perplexity for part in parts)
    differences = [part.difference for part in parts]
    logits, entropy, cached = (
        max(getattr(one, name) for one in differences) for name in ("logits", "entropy", "cached")
    )
    known = [one for one in differences if one.mean_logits < math.inf]
    means = (max((getattr(one, name) for one in known), default=math.inf) for name in ("mean_logits", "mean_entropy"))
    return Tolerance(
        Difference(logits, entropy, cached, *means), perplexity, BETWEEN_RUNTIMES if len(parts) == 3 else None
    )
