"""What a kernel is compiled for."""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import triton.language as tl

from sharp.plugins.ops.attributes import HEAD_PARAMETERS, SCALED_CACHES, WITHOUT_SINK

LISTED_KEYS = 64
SPLIT_KEYS = 256  # fewest keys of a split of decoding, but for the only one of a unit
MOST_SPLITS = 128  # of a unit
LOG2_E = 1.4426950408889634
_CODE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


def power_name(alpha: float) -> str:
    """Which form of entmax's weight [s - tau]_+^(1 / (alpha - 1)) a kernel needs: the power 1, 2 or any other."""
    return {2.0: "one", 1.5: "two"}.get(alpha, "any")


@dataclass(frozen=True)
class Options:
    """The compile-time options of all kernels; each kernel gets it as its one constexpr argument.

    `rows` and `keys` are the size of a tile of logits: query rows (token, head) that share a KV head, times keys.
    """

    normalizer: str
    dtype: str  # of query, key, value and output: float16, bfloat16, float32
    cache_dtype: str  # that of the query, int8 or fp8; float16 or bfloat16 with float32
    head_dim: int
    value_dim: int
    block_size: int
    statistics: bool = False  # whether there is an input collect_stats; its value is read on the device
    alibi: bool = False
    softcap: bool = False
    contiguous: bool = False  # op SharpAttention: keys and values lie one behind the other, without a block table
    power: str = ""  # of entmax: one, two, any
    rows: int = 16
    keys: int = 64
    screened: bool = False  # entmax over a cache with a key screen
    specialized: bool = False  # of prompts: `specialized.py` visits full tiles before
    spread: bool = False  # sums are kept for every place of a tile, and added up behind the loop
    code: str = field(default=_CODE, init=False)  # Triton's cache sees the fields, and not what the properties compute

    @property
    def quantized(self) -> bool:
        """The cache holds integers or e4m3 numbers, and a scale for every block and head beside it.

        Such numbers of 8 bits are exact in bfloat16; what they are multiplied by becomes a sum of bfloat16 numbers.
        """
        return self.cache_dtype in SCALED_CACHES

    @property
    def key_element(self) -> tl.dtype:
        """The type in which queries and keys are multiplied; float16 has all numbers of 8 bits, too."""
        return tl.bfloat16 if self.quantized and self.dtype == "float32" else getattr(tl, self.dtype)

    @property
    def value_element(self) -> tl.dtype:
        """The type in which weights and values are multiplied: with its scale a weight may be too small for float16."""
        return tl.bfloat16 if self.quantized else getattr(tl, self.dtype)

    @property
    def query_parts(self) -> int:
        """Numbers of `key_element` that a query is the sum of: three have the 24 bits of a float32."""
        return 3 if self.quantized and self.dtype == "float32" else 1

    @property
    def weight_parts(self) -> int:
        """Numbers of `value_element` that a weight is the sum of: two have 16 bits, where a float16 has 11."""
        return 2 if self.quantized and self.dtype != "bfloat16" else 1

    @property
    def precision(self) -> str:
        """Of float32's matrix products: as they are, or by three of tf32, whose error is about that of float32."""
        return "tf32x3" if self.dtype == "float32" and not self.quantized else "ieee"

    @property
    def head_width(self) -> int:
        """Head dim padded to a power of two."""
        return max(16, _power_of_two(self.head_dim))

    @property
    def quads(self) -> int:
        """Words of a key in its screen: four channels each, the last filled up with zeros."""
        return -(-self.head_dim // 4)

    @property
    def quad_width(self) -> int:
        """Those padded to a power of two that a matrix product takes."""
        return max(16, _power_of_two(self.quads))

    @property
    def screen_element(self) -> tl.dtype:
        """The type in which queries and integers of a screen are multiplied."""
        return tl.bfloat16 if self.dtype == "float32" else getattr(tl, self.dtype)

    @property
    def screen_parts(self) -> int:
        """Numbers of `screen_element` that a query is the sum of, but for `screen_rest`."""
        return 2 if self.dtype == "float32" else 1

    @property
    def screen_rest(self) -> float:
        """What that sum leaves of a query, of its length at most."""
        return 2.0**-17 if self.dtype == "float32" else 0.0

    @property
    def longest_integers(self) -> float:
        """Most length of a key's integers."""
        return 127.0 * math.sqrt(4 * self.quads)

    @property
    def value_width(self) -> int:
        """Value dim padded to a power of two."""
        return max(16, _power_of_two(self.value_dim))

    @property
    def blocks(self) -> int:
        """Cache blocks that a tile of keys touches."""
        return max(1, self.keys // self.block_size)

    @property
    def listed_keys(self) -> int:
        """How many keys entmax's prompts list together: the list stays short where tiles are small."""
        return max(self.keys, LISTED_KEYS)

    @property
    def pointwise(self) -> bool:
        """Weights are not divided by their sum."""
        return self.normalizer in WITHOUT_SINK

    @property
    def peak_from_zero(self) -> bool:
        """There is a scale without any key: rows whose weights all are 0 have output and entropy 0."""
        return self.pointwise or self.normalizer == "softpick"

    @property
    def own_parameters(self) -> int:
        """Columns of head_params before that of the sinks."""
        return len(HEAD_PARAMETERS.get(self.normalizer, ()))

    @property
    def solves(self) -> bool:
        """A weight is known only after something has been found out about all logits of the row."""
        return self.normalizer in ("adaptive_softmax", "entmax")

    @property
    def estimates(self) -> bool:
        """Entmax's prompts weigh values with a threshold that is looked at only then, as it mostly is good enough.

        It moves the entropy of a row by up to 0.01 nats, and its support by a few keys.
        """
        return self.power == "two" and self.dtype == "bfloat16"

    @property
    def sets_of_sums(self) -> int:
        """How many sets of sums a split prompt has: a pass reads those of the pass before and of the first."""
        return {"adaptive_softmax": 2, "entmax": 3}.get(self.normalizer, 1)

    @property
    def sparse(self) -> bool:
        """Weights may be 0; `support` counts those that are not."""
        return self.normalizer in ("entmax", "relu", "relu2", "softpick")

    @property
    def scaled_late(self) -> bool:
        """Products of queries and keys are logits but for a factor: there is no soft cap and no position bias."""
        return not (self.softcap or self.alibi)

    @property
    def unit(self) -> float:
        """What logits are multiplied by inside: e^z is computed as 2^(z log2 e), and the factor goes into the scale."""
        return LOG2_E if self.normalizer in ("softmax", "adaptive_softmax") else 1.0

    @property
    def peak_of_exponents(self) -> bool:
        """The peak is that of base-2 exponents made of the logits, and no `logit_factor` is missing from it."""
        return self.normalizer in ("ssa", "softpick")

    @property
    def peak_is_highest(self) -> bool:
        """The running maximum of the exponents is that of the logits."""
        return self.normalizer in ("softmax", "adaptive_softmax", "entmax")

    @property
    def rarely_shifted(self) -> bool:
        """Weights seldom leave the range of their type: ssa's, but for float16, are powers of logits."""
        return self.normalizer == "ssa" and self.value_element != tl.float16

    @property
    def wide_weights(self) -> bool:
        """Weights may leave float16's range, so their product with the values is computed in tf32."""
        return self.value_element == tl.float16 and self.normalizer in ("relu", "relu2")


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
