"""The key screen: a copy of the keys in 8 bits that tells with certainty which keys have weight 0 under entmax.

A key k of head h is written as k = c + s n + r. c is the head's `key_shift` (constant; any value will do), n are
integers from -127 to 127, s = max |k - c| / 127 is the key's scale, and r is the remainder. The screen holds n, s and
d >= |r| (`distance`).

**The bound.** For a query q, already multiplied by the op's scale, Cauchy-Schwarz gives

    |q.k - (q.c + s q.n)| = |q.r| <= |q| |r| <= |q| d.

The kernel writes q as t m + e with m integers of 16 bits, so that m.n is summed exactly in 32 bits. |e.n| <= |e| |n|,
and |n| <= 127 sqrt(head_dim) = N. With z = q.c + s t m.n the logit lies in [z - w, z + w],

    w = |q| d + s N |e| + rounding,   rounding = (head_dim + 32) 2^-24 |q| (|c| + s N + d).

`rounding` covers two errors. The ordinary kernel's float32 logit differs from q.k, because each of head_dim products
and sums is off by at most 2^-24 of the partial sum, whose magnitude Cauchy-Schwarz bounds by |q| |k| <= |q| (|c| + s N
+ d). And the few operations that compute z and w round, too. The three factors of w are computed in float64 and rounded
up.

**Order preserved.** Soft cap and position bias are monotonic in the logit, so they map the ends of the interval. The
errors of the approximated tanh (2^-19 of the cap) and of the bias (2^-21 of the bias) are added.

**Certainty.** Let L be the largest lower end of all visible keys. The largest logit is at least L. Under entmax(alpha)
tau >= (alpha - 1) max z - 1 (design, section 4), so a key with z <= max z - 1 / (alpha - 1) has weight 0. Therefore a
key whose upper end is at most L - 1 / (alpha - 1), less a few units in the last place, is skipped *whatever it is*, and
all others are computed as without a screen: same logits, same order, same sums. For the statistics a key is also in
doubt if its lower end is at most the smallest upper end, so that the smallest logit is exact, too.

**Many keys near the largest** raise tau further. If m keys have lower ends of v or more, their weights at the threshold
f = v - m^(1 - alpha) / (alpha - 1), in logits, already sum to 1: m [(alpha - 1)(v - f)]^(1 / (alpha - 1)) = 1. So
tau is at least f, and a key whose upper end is at most f has weight 0; m = 1 is the bound above. The kernels for CPUs
take the largest such f over the best keys of groups, one group for each vector lane and part of the keys, at most 256
(plugins/cpu/floors.h). If a screen could be used, the ordinary kernel drops logits below the f of the logits
themselves, which is no smaller, before it searches tau. So both kernels search among the same logits, and the result is
the same bit for bit.

**Without a bound.** A key with NaN or infinity, or longer than 2^60, has distance infinity and is always in doubt. For
a query with NaN or infinity, or longer than 2^60, all keys are in doubt. Zeros in the screen mean that nothing is known
of a key, so a cache that was filled without its screen is read in full. A key shorter than 2^-100 is its own remainder.
No product or sum can then overflow.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
LONGEST, SHORTEST = 2.0**60, np.float32(2.0**-100)
LEAST = np.finfo(np.float32).tiny


def screen_bytes(head_dim: int, block_size: int) -> int:
    """Return the number of bytes of the screen of one block and head.

    A screen is integers int8 [quads, block_size, 4], quads being head_dim / 4 rounded up, then two float32 per key.
    """
    return (4 * -(-head_dim // 4) + 8) * block_size


@dataclass(frozen=True)
class Screen:
    """A screen of keys [..., head_dim]: integers int8 [..., head_dim], scale and distance float32 [...].

    A key is shift + scale * integers + a remainder whose length is at most `distance`. A distance of 0 means that
    nothing is known of the key, infinity that the key has no bound.
    """

    integers: NDArray[np.int8]
    scale: NDArray[np.float32]
    distance: NDArray[np.float32]


def screen_of(keys: Floats, shift: Floats) -> Screen:
    """Return the screen of keys [..., head_dim] as a cache holds them; `shift` is broadcast to the keys.

    A key that is not finite or is 2^60 or longer has the distance infinity.
    """
    keys = keys.astype(np.float32)
    shift = shift.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        known = np.linalg.norm(keys.astype(np.float64), axis=-1) < LONGEST  # false for NaN
        moved = np.where(known[..., None], keys - shift, 0).astype(np.float32)
    largest = np.abs(moved).max(-1)
    scale = np.where(largest >= SHORTEST, largest / np.float32(127), 0).astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    integers = np.clip(np.rint(moved * inverse[..., None]), -127, 127)
    exact = np.where(known[..., None], keys, 0).astype(np.float64) - shift
    rest = exact - scale.astype(np.float64)[..., None] * integers
    distance = (np.linalg.norm(rest, axis=-1) * (1 + 2.0**-20)).astype(np.float32) + LEAST
    return Screen(integers.astype(np.int8), scale, np.where(known, distance, np.inf).astype(np.float32))


def pack(screen: Screen) -> NDArray[np.int8]:
    """Return a screen of [blocks, kv_heads, block_size] keys as the op's key_screen.

    The result is int8 [blocks, kv_heads, screen_bytes]: integers, scales and distances of each block, in this order.
    """
    blocks, heads, block_size, head_dim = screen.integers.shape
    padded = np.zeros((blocks, heads, block_size, 4 * -(-head_dim // 4)), np.int8)
    padded[..., :head_dim] = screen.integers
    quads = padded.reshape(blocks, heads, block_size, -1, 4).swapaxes(2, 3)
    parts = (quads, *(np.ascontiguousarray(part).view(np.int8) for part in (screen.scale, screen.distance)))
    return np.concatenate([part.reshape(blocks, heads, -1) for part in parts], axis=2)


def unpack(key_screen: NDArray[np.int8], head_dim: int, block_size: int) -> Screen:
    """Return the screen of [blocks, kv_heads, block_size] keys that `pack` packed; it may share the array's memory."""
    blocks, heads, _ = key_screen.shape
    quads = -(-head_dim // 4)
    integers, floats = np.split(key_screen, [4 * quads * block_size], axis=2)
    by_key = integers.reshape(blocks, heads, quads, block_size, 4).swapaxes(2, 3)
    scale, distance = np.split(np.ascontiguousarray(floats).view(np.float32), 2, axis=2)
    return Screen(by_key.reshape(blocks, heads, block_size, -1)[..., :head_dim], scale, distance)


def screen_of_cache(key_cache: NDArray[Any], key_shift: Floats | None = None) -> NDArray[np.int8]:
    """Return the `key_screen` of a whole float cache [blocks, kv_heads, head_dim, block_size].

    `key_shift` is [kv_heads, head_dim]; None: zeros.
    """
    shift = np.zeros(key_cache.shape[1:3]) if key_shift is None else key_shift
    return pack(screen_of(np.swapaxes(key_cache, 2, 3), shift[:, None]))


def store_screen(
    key_cache: NDArray[Any], key_screen: NDArray[np.int8], key_shift: Floats | None, slot_mapping: NDArray[np.integer]
) -> None:
    """Update `key_screen` in place with the keys that `key_cache` holds in the slots `slot_mapping`.

    Call this after the keys are stored. Slots below 0 are ignored. `key_screen` has as many blocks as `key_cache`
    [blocks, kv_heads, head_dim, block_size], or none, and then stays as it is. `key_shift` is [kv_heads, head_dim],
    None: zeros.
    """
    head_dim, block_size = key_cache.shape[2:]
    slots = slot_mapping[slot_mapping >= 0]
    if not len(slots) or not len(key_screen):
        return
    fresh, held = (
        unpack(screen, head_dim, block_size) for screen in (screen_of_cache(key_cache, key_shift), key_screen)
    )
    written = np.zeros((key_cache.shape[0], 1, block_size), bool)
    written[slots // block_size, 0, slots % block_size] = True
    key_screen[...] = pack(
        Screen(
            np.where(written[..., None], fresh.integers, held.integers),
            np.where(written, fresh.scale, held.scale),
            np.where(written, fresh.distance, held.distance),
        )
    )


def intervals(query: Floats, screen: Screen, shift: Floats) -> tuple[Floats, Floats]:
    """Return the lower and upper ends of the logits q.k before soft cap and bias, float64 [n] each.

    The ends are infinite for a key without a bound, and for all keys if the query is not finite or is 2^60 or longer.

    Args:
        query: [head_dim], already multiplied by the op's scale.
        screen: the screen of n keys of one head.
        shift: [head_dim], the shift that the screen was made with.
    """
    query, shift = query.astype(np.float64), shift.astype(np.float64)
    head_dim, length = len(query), float(np.linalg.norm(query))
    scale, distance = screen.scale.astype(np.float64), screen.distance.astype(np.float64)
    distance = np.where(distance == 0, np.inf, distance)
    if not length < LONGEST:
        return np.full(len(scale), -np.inf), np.full(len(scale), np.inf)
    padded = 4 * -(-head_dim // 4)
    most = int(min(32767, (2**31 - 2) / (127 * padded)))
    step = float(np.abs(query).max()) / most
    rest = 0.0 if step == 0 else float(np.linalg.norm(query - step * np.rint(query / step)))
    longest, rounding = 127 * padded**0.5, (head_dim + 32) * 2.0**-24
    z = query @ shift + scale * (screen.integers.astype(np.float64) @ query)
    width = length * distance * (1 + rounding) + scale * longest * (rest + rounding * length)
    width += rounding * length * np.linalg.norm(shift) + 2.0**-100 * (1 + distance)
    return z - width, z + width


def in_doubt(lower: Floats, upper: Floats, alpha: float) -> NDArray[np.bool_]:
    """Return which keys may have a weight under entmax(alpha), bool [n]; all other keys surely have the weight 0.

    `lower` and `upper` [n] are the ends of the intervals of one query's visible keys, after soft cap and bias.
    """
    highest, width = lower.max(initial=-np.inf), 1 / (alpha - 1)
    with np.errstate(invalid="ignore"):
        doubtful: NDArray[np.bool_] = ~(upper <= highest - width - (abs(highest) + width) * 2.0**-20)
    return doubtful
