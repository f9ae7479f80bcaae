"""The key screen: a copy of the keys in 8 bits that tells, for certain, which keys have weight 0 under entmax.

A key k of head h is written as k = c + s n + r: c the head's `key_shift` (constant; any value will do), n integers from
-127 to 127, s the key's scale max |k - c| / 127, and r what is left. The screen holds n, s and d >= |r| (`distance`).

**The bound.** For a query q, already times the op's scale, Cauchy-Schwarz gives

    |q.k - (q.c + s q.n)| = |q.r| <= |q| |r| <= |q| d.

The kernel has q as t m + e, m integers of 16 bits, so that m.n is summed up exactly in 32: |e.n| <= |e| |n|, and |n| <=
127 sqrt(head_dim) = N. With z = q.c + s t m.n the logit lies in [z - w, z + w],

    w = |q| d + s N |e| + rounding,   rounding = (head_dim + 32) 2^-24 |q| (|c| + s N + d).

`rounding` covers what the ordinary kernel's logit in float32 differs from q.k: head_dim products and sums, each off by
at most 2^-24 of what is summed up so far, whose magnitude Cauchy-Schwarz bounds by |q| |k| <= |q| (|c| + s N + d); and
the few operations by which z and w themselves are found. The three factors of w are computed in float64 and rounded up.

**Order preserved.** Soft cap and position bias are monotonic in the logit, so they map the ends of the interval; an
error of the approximated tanh (2^-19 of the cap) and of the bias (2^-21 of it) is added.

**Certainty.** Let L be the largest lower end of all visible keys. The largest logit is at least L. Under entmax(alpha)
tau >= (alpha - 1) max z - 1 (design, section 4), so a key with z <= max z - 1 / (alpha - 1) has weight 0. A key whose
upper end is at most L - 1 / (alpha - 1), less a few units in the last place, is therefore left out *whatever it is*,
and all others are computed as ever: same logits, same order, same sums. For the statistics a key is also in doubt if
its lower end is at most the smallest upper end, so that the smallest logit is exact too.

**Many keys near the largest** raise tau further. If m keys have lower ends of v or more, their weights at the threshold
f = v - m^(1 - alpha) / (alpha - 1), in logits, sum up to 1 already: m [(alpha - 1)(v - f)]^(1 / (alpha - 1)) = 1. So
tau is no lower, and a key whose upper end is at most f has weight 0; m = 1 is the bound above. The kernels for CPUs
take the largest such f over the best keys of groups, one for each vector lane and part of the keys, 256 at most
(plugins/cpu/floors.h). Where a screen may stand, the ordinary kernel drops logits below the f of the logits themselves,
which is no smaller, before it looks for tau: so both look among the same ones, and the result is the same bit for bit.

**What cannot be bounded.** A key with NaN or infinity, or longer than 2^60, has distance infinity and is always in
doubt; for such a query all keys are. Zeros say that nothing is known of a key, so a cache that something else has
filled is read in full. Shorter than 2^-100, a key is its own remainder. No product or sum can then overflow.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
LONGEST, SHORTEST = 2.0**60, np.float32(2.0**-100)
LEAST = np.finfo(np.float32).tiny


def screen_bytes(head_dim: int, block_size: int) -> int:
    """Bytes of the screen of one block and head: integers [quads, block_size, 4], then two floats of each key."""
    return (4 * -(-head_dim // 4) + 8) * block_size


@dataclass(frozen=True)
class Screen:
    """integers int8 [..., head_dim], scale and distance float32 [...]; of keys [..., head_dim]."""

    integers: NDArray[np.int8]
    scale: NDArray[np.float32]
    distance: NDArray[np.float32]


def screen_of(keys: Floats, shift: Floats) -> Screen:
    """The screen of keys [..., head_dim] as a cache holds them; `shift` is broadcast to them."""
    keys = keys.astype(np.float32)
    shift = shift.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        known = np.linalg.norm(keys.astype(np.float64), axis=-1) < LONGEST  # a NaN is not
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
    """A screen of [blocks, kv_heads, block_size] keys as the op's `key_screen`, int8 [blocks, kv_heads, bytes]."""
    blocks, heads, block_size, head_dim = screen.integers.shape
    padded = np.zeros((blocks, heads, block_size, 4 * -(-head_dim // 4)), np.int8)
    padded[..., :head_dim] = screen.integers
    quads = padded.reshape(blocks, heads, block_size, -1, 4).swapaxes(2, 3)
    parts = (quads, *(np.ascontiguousarray(part).view(np.int8) for part in (screen.scale, screen.distance)))
    return np.concatenate([part.reshape(blocks, heads, -1) for part in parts], axis=2)


def unpack(key_screen: NDArray[np.int8], head_dim: int, block_size: int) -> Screen:
    """What `pack` has packed; writing into scale or distance changes nothing."""
    blocks, heads, _ = key_screen.shape
    quads = -(-head_dim // 4)
    integers, floats = np.split(key_screen, [4 * quads * block_size], axis=2)
    by_key = integers.reshape(blocks, heads, quads, block_size, 4).swapaxes(2, 3)
    scale, distance = np.split(np.ascontiguousarray(floats).view(np.float32), 2, axis=2)
    return Screen(by_key.reshape(blocks, heads, block_size, -1)[..., :head_dim], scale, distance)


def screen_of_cache(key_cache: NDArray[Any], key_shift: Floats | None = None) -> NDArray[np.int8]:
    """`key_screen` for all that a cache [blocks, kv_heads, head_dim, block_size] of floats holds."""
    shift = np.zeros(key_cache.shape[1:3]) if key_shift is None else key_shift
    return pack(screen_of(np.swapaxes(key_cache, 2, 3), shift[:, None]))


def store_screen(
    key_cache: NDArray[Any], key_screen: NDArray[np.int8], key_shift: Floats | None, slot_mapping: NDArray[np.integer]
) -> None:
    """Bring `key_screen` up to date, in place, with the keys that were stored in these slots of the cache."""
    head_dim, block_size = key_cache.shape[2:]
    slots = slot_mapping[slot_mapping >= 0]
    if not len(slots):
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
    """Both ends of the logits q.k before soft cap and bias, float64 [n].

    Args:
        query: [head_dim], times the op's scale.
        screen: of n keys.
        shift: [head_dim].
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
    """Of keys with these ends of intervals, after soft cap and bias, those that may have a weight under entmax."""
    highest, width = lower.max(initial=-np.inf), 1 / (alpha - 1)
    with np.errstate(invalid="ignore"):
        doubtful: NDArray[np.bool_] = ~(upper <= highest - width - (abs(highest) + width) * 2.0**-20)
    return doubtful
