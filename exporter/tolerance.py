"""What a written model may differ by, from the precision that it was written in."""

from dataclasses import dataclass

from sharp.exporter.graph_options import GraphOptions
from sharp.exporter.verification import FLOAT32, Difference


@dataclass(frozen=True)
class Tolerance:
    """Of logits and entropies in every case, and of the perplexity of a text, relative to PyTorch's in float32.

    A quantized model's perplexity may also fall, and `between_runtimes` is that of its other runtimes, relative to the
    first: a short text, which is all that standard ops can read, says little about quantized against exact weights.
    """

    difference: Difference
    perplexity: float
    between_runtimes: float | None = None


# A type of less precision moves single logits and the entropies of sharp heads by much, but the perplexity of a text by
# little: errors are both ways. SmolLM2's largest errors of logits were 0.07 in int8 and 0.45 in int4; the bounds are
# about twice that. Those of the other types were only tried on small models; int4's perplexity is what is asked of it.
PLAIN = Tolerance(FLOAT32, perplexity=1e-3)
# Quantized products round activations to 8 bits, which turns the last bit of a sum into a step: SmolLM2 in int4 differed
# by 0.5 % on 255 tokens.
BETWEEN_RUNTIMES = 2e-2
OF_PRECISION = {
    "float32": PLAIN,
    "float16": Tolerance(Difference(logits=1e-2, entropy=5e-2), perplexity=5e-3),
    "bfloat16": Tolerance(Difference(logits=8e-2, entropy=0.3), perplexity=2e-2),
    "int8 cache": Tolerance(Difference(logits=0.1, entropy=0.3), perplexity=2e-2),
    "int8": Tolerance(Difference(logits=0.15, entropy=0.5), perplexity=1e-2),
    "int4": Tolerance(Difference(logits=0.9, entropy=2.0), perplexity=0.08),
}


def tolerance_of(options: GraphOptions, *, quantized: bool) -> Tolerance:
    """The tolerance of a model written with `options`, before or after it was quantized."""
    cache = options.cache_dtype
    names = [options.dtype, "int8 cache" if cache == "int8" else cache]
    if quantized and options.quantize is not None:
        names.append(options.quantize)
    parts = [OF_PRECISION[name] for name in names]
    return Tolerance(
        Difference(max(part.difference.logits for part in parts), max(part.difference.entropy for part in parts)),
        max(part.perplexity for part in parts),
        BETWEEN_RUNTIMES if quantized and options.quantize is not None else None,
    )
