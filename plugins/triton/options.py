"""The compile-time options of kernels."""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import triton.language as tl

from sharp.plugins.op import definition
from sharp.plugins.op.definition import NORMALIZERS, SCALED_CACHES, NormalizerDefinition

LISTED_KEYS = 64
SPLIT_KEYS = 256  # minimum keys of a split of decoding, unless it is the only split of its unit
MOST_SPLITS = 128  # maximum splits of a unit
LOG2_E = 1.4426950408889634
_NORMALIZERS = {normalizer.name: normalizer for normalizer in NORMALIZERS}
_CODE = hashlib.sha256(Path(__file__).read_bytes() + Path(definition.__file__).read_bytes()).hexdigest()[:8]


def power_name(alpha: float) -> str:
    """Return how a kernel computes entmax's power 1 / (alpha - 1): "one" (alpha 2), "two" (alpha 1.5) or "any"."""
    return {2.0: "one", 1.5: "two"}.get(alpha, "any")


@dataclass(frozen=True)
class Options:
    """The compile-time options of all kernels, passed to each kernel as its constexpr argument OPTIONS.

    `rows` and `keys` are the size of a tile of logits: query rows (token, head) that share a KV head, times keys.
    Values are not checked here.
    """

    normalizer: str
    dtype: str  # of query, key, value and output: float16, bfloat16, float32
    cache_dtype: str  # dtype, int8 or fp8; with dtype float32 also float16 or bfloat16
    head_dim: int
    value_dim: int
    block_size: int
    statistics: bool = False  # whether there is an input collect_stats; its value is read on the device
    alibi: bool = False
    softcap: bool = False
    contiguous: bool = False  # the op is SharpAttention: keys and values are contiguous, without a block table
    power: str = ""  # entmax only: one, two, any
    rows: int = 16
    keys: int = 64
    screened: bool = False  # entmax over a cache with a key screen
    spread: bool = False  # sums are kept for every place of a tile, and added up after the loop
    code: str = field(default=_CODE, init=False)  # Triton's cache key has the fields, but not the properties' code

    @property
    def _definition(self) -> NormalizerDefinition:
        return _NORMALIZERS[self.normalizer]

    @property
    def quantized(self) -> bool:
        """Whether the cache holds integers or e4m3 numbers, with a scale for every block and head.

        Numbers of 8 bits are exact in bfloat16. The other operand of their matrix products becomes a sum of bfloat16
        numbers.
        """
        return self.cache_dtype in SCALED_CACHES

    @property
    def key_element(self) -> tl.dtype:
        """The type in which queries and keys are multiplied: bfloat16 for float32 over a scaled cache, else `dtype`.

        float16 and bfloat16 represent the 8-bit numbers of int8 and fp8 caches exactly.
        """
        return tl.bfloat16 if self.quantized and self.dtype == "float32" else getattr(tl, self.dtype)

    @property
    def value_element(self) -> tl.dtype:
        """The type in which weights and values are multiplied: `dtype`, or bfloat16 for a cache with scales.

        It is not float16 for such a cache, because a weight times its block's scale may be too small for float16.
        """
        return tl.bfloat16 if self.quantized else getattr(tl, self.dtype)

    @property
    def query_parts(self) -> int:
        """The number of `key_element` numbers whose sum is a query: 3 for float32 over a scaled cache, otherwise 1.

        Three bfloat16 numbers have the 24 bits of a float32.
        """
        return 3 if self.quantized and self.dtype == "float32" else 1

    @property
    def weight_parts(self) -> int:
        """The number of `value_element` numbers whose sum is a weight: 1, or 2 for a scaled cache.

        It is 1 in any case if queries are bfloat16.

        Two bfloat16 numbers have 16 bits, a float16 has 11.
        """
        return 2 if self.quantized and self.dtype != "bfloat16" else 1

    @property
    def precision(self) -> str:
        """The precision of matrix products, for tl.dot.

        "tf32x3" for float32 without scales: three products in tf32, whose error is about that of float32. "ieee" for
        all other types.
        """
        return "tf32x3" if self.dtype == "float32" and not self.quantized else "ieee"

    @property
    def head_width(self) -> int:
        """The head dim, rounded up to a power of two of at least 16."""
        return max(16, _power_of_two(self.head_dim))

    @property
    def quads(self) -> int:
        """The number of words per key in a screen. Each holds four channels; the last is filled up with zeros."""
        return -(-self.head_dim // 4)

    @property
    def quad_width(self) -> int:
        """The number of quads, rounded up to the power of two that tl.dot requires (at least 16)."""
        return max(16, _power_of_two(self.quads))

    @property
    def screen_element(self) -> tl.dtype:
        """The type in which queries and a screen's integers are multiplied: bfloat16 for float32, else `dtype`."""
        return tl.bfloat16 if self.dtype == "float32" else getattr(tl, self.dtype)

    @property
    def screen_parts(self) -> int:
        """The number of `screen_element` numbers that a query is split into for a screen: 2 for float32, else 1.

        The sum of two bfloat16 numbers differs from a float32 query by at most `screen_rest`.
        """
        return 2 if self.dtype == "float32" else 1

    @property
    def screen_rest(self) -> float:
        """The largest length of a query less its `screen_parts`, over the query's length: 2^-17 for float32, else 0."""
        return 2.0**-17 if self.dtype == "float32" else 0.0

    @property
    def longest_integers(self) -> float:
        """The largest Euclidean length of the integers of one key in a screen, each of which is from -127 to 127."""
        return 127.0 * math.sqrt(4 * self.quads)

    @property
    def value_width(self) -> int:
        """The value dim, rounded up to a power of two of at least 16."""
        return max(16, _power_of_two(self.value_dim))

    @property
    def blocks(self) -> int:
        """The number of cache blocks that a tile of keys touches."""
        return max(1, self.keys // self.block_size)

    @property
    def listed_keys(self) -> int:
        """The number of keys per entry in the list of entmax's prefill. A minimum keeps lists of small tiles short."""
        return max(self.keys, LISTED_KEYS)

    @property
    def pointwise(self) -> bool:
        """Whether weights are not divided by their sum, so that there is no sink: sigmoid, relu and relu2."""
        return not self._definition.competes

    @property
    def peak_from_zero(self) -> bool:
        """Whether weights have a fixed scale, so that rows whose weights are all 0 have output and entropy 0."""
        return self.pointwise or self.normalizer == "softpick"

    @property
    def own_parameters(self) -> int:
        """The number of columns of head_params before the sink's column, whether or not there is a sink."""
        return len(self._definition.columns)

    @property
    def solves(self) -> bool:
        """Whether a weight is known only after a pass over all logits of the row: adaptive softmax and entmax."""
        return self._definition.passes > 1

    @property
    def estimates(self) -> bool:
        """Whether entmax's prefill weighs values with an estimated threshold and checks the estimate afterwards.

        An estimate is mostly good enough. It moves the entropy of a row by up to 0.01 nats, and its support by a few
        keys.
        """
        return self.power == "two" and self.dtype == "bfloat16"

    @property
    def sparse(self) -> bool:
        """Whether a visible key can have weight 0; `support` counts the keys with other weights."""
        return self._definition.sparse

    @property
    def scaled_late(self) -> bool:
        """Whether query . key is the logit up to a factor, because there is no soft cap and no position bias."""
        return not (self.softcap or self.alibi)

    @property
    def unit(self) -> float:
        """The factor that kernels multiply into `scale`: log2 e where e^z is computed as 2^(z log2 e), otherwise 1.

        So logits inside such kernels are base-2 exponents.
        """
        return LOG2_E if self.normalizer in ("softmax", "adaptive_softmax") else 1.0

    @property
    def peak_of_exponents(self) -> bool:
        """Whether the peak is the maximum of base-2 exponents, which already include the `logit_factor`."""
        return self.normalizer in ("ssa", "softpick")

    @property
    def peak_is_highest(self) -> bool:
        """Whether the running maximum of the exponents is also that of the logits."""
        return self.normalizer in ("softmax", "adaptive_softmax", "entmax")

    @property
    def rarely_shifted(self) -> bool:
        """Whether weights seldom leave the range of their type. ssa's, powers of logits, do so only in float16."""
        return self.normalizer == "ssa" and self.value_element != tl.float16

    @property
    def wide_weights(self) -> bool:
        """Whether weights may leave float16's range, so that their product with the values is computed in tf32.

        Only relu and relu2 need it: sigmoid's weights are at most 1.
        """
        return self.value_element == tl.float16 and self.pointwise and self.sparse


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
