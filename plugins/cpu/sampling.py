"""Sampling of tokens from logits, and log probabilities of tokens, in native code (`plugins/cpu/sampling.cc`)."""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sharp.core.errors import SharpError
from sharp.plugins import library_path

NO_TOKEN = -1
ROWS_OF_THREAD = 8  # sampling fewer rows takes less time than waking a thread
MOST_THREADS = 8
# A logit's change: + bias (-infinity masks it), / repetition where it is positive and * repetition elsewhere, - amount.
CHANGE = np.dtype([("token", np.int32), ("bias", np.float32), ("repetition", np.float32), ("amount", np.float32)])
MOST_CHANGES = 2**16  # maximum changes of all rows that a GPU samples in one call


@dataclass(frozen=True)
class Changes:
    """The changes of some logits of each row before its token is sampled, in two parts that are applied in order.

    Attributes:
        starts: int32 [2 rows + 1], the parts' first indices in `entries`: row 0's first, row 0's second, row 1's
            first...
        entries: CHANGE [starts[-1]]; a part names a token at most once.
    """

    starts: NDArray[np.int32]
    entries: NDArray[np.void]

    @classmethod
    def of(cls, parts: Sequence[NDArray[np.void]]) -> "Changes":
        """Return the changes made of `parts`, arrays of CHANGE: row 0's first, row 0's second, row 1's first..."""
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        return cls(starts, np.concatenate([np.empty(0, CHANGE), *parts]))

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change logits [rows, vocab] in place, in float32, at a cost proportional to the number of entries.

        For each entry: logit + bias, or -infinity if bias is that; then / repetition if positive, otherwise
        * repetition; then - amount.
        """
        lengths = np.diff(self.starts)
        both = lengths[::2].any() and lengths[1::2].any()
        number_of = np.repeat(np.arange(len(lengths)), lengths)
        for first in (0, 1):
            if not lengths[first::2].any():
                continue
            own = np.flatnonzero(number_of % 2 == first) if both else slice(None)
            rows, tokens = number_of[own] // 2, self.entries["token"][own].astype(np.int64)
            bias, repetition, amount = (self.entries[name][own] for name in ("bias", "repetition", "amount"))
            with np.errstate(invalid="ignore", over="ignore"):
                old = np.where(bias == -np.inf, bias, logits[rows, tokens] + bias)
                logits[rows, tokens] = np.where(old > 0, old / repetition, old * repetition) - amount


def sample(logits: NDArray[np.float32], samplings: NDArray[np.float64], *, threads: int = 1) -> NDArray[np.int64]:
    """Sample a token per row: logits float32 [rows, vocab], samplings float64 [rows, 5] -> int64 [rows].

    A row of samplings is sharpness, top_k, top_p, min_p and a random number in [0, 1). Tokens are sampled from
    softmax(sharpness * logits) after top-k, top-p and min-p in this order; the values 0, 1 and 0 keep all tokens.
    Tokens that tie with the last kept token are kept, too. Of the kept tokens, in the order of their ids, the first
    token is taken whose cumulated probability is above the random number. A sharpness of 0 takes the most likely token.
    A row whose highest logit is not finite, or that has a NaN, gets NO_TOKEN (-1).

    At most `threads` threads, and never more than 8, share the rows. If every sharpness is 0 one thread does all, as it
    is done before others wake.

    Raises:
        SharpError: the native library is missing, or refuses the arguments.
    """
    logits, samplings = np.ascontiguousarray(logits), np.ascontiguousarray(samplings)
    chosen = np.empty(len(logits), np.int64)
    parts = min(threads, len(logits) // ROWS_OF_THREAD) if samplings[:, 0].any() else 1
    if parts <= 1:
        _sample(logits, samplings, chosen)
        return chosen
    cuts = [len(logits) * part // parts for part in range(parts + 1)]
    pieces = [(logits[a:b], samplings[a:b], chosen[a:b]) for a, b in pairwise(cuts)]
    others = [_pool().submit(_sample, *piece) for piece in pieces[1:]]
    _sample(*pieces[0])
    for other in others:
        other.result()
    return chosen


def _sample(logits: NDArray[np.float32], samplings: NDArray[np.float64], chosen: NDArray[np.int64]) -> None:
    """Sample one token per row by the native library and write the tokens to `chosen`.

    `logits` is [rows, vocab], `samplings` [rows, parameters], one row of parameters each, and `chosen` [rows]; all are
    contiguous.

    Raises:
        SharpError: the library refuses the parameters.
    """
    rows, vocab = logits.shape
    _check(_library().sharp_sample(logits.ctypes, rows, vocab, samplings.ctypes, chosen.ctypes))


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the process's threads for sampling, `MOST_THREADS` - 1, because the caller's own thread works too."""
    return ThreadPoolExecutor(MOST_THREADS - 1, "sampling")


def logprobs(
    logits: NDArray[np.float32], rows: Sequence[int], token_ids: Sequence[int], top: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return natural log probabilities of one given token and of the `top` (<= vocab) best in some rows of logits.

    The logits are float32 [n, vocab]. `rows` are the numbers of the rows to read, and `token_ids` the given token of
    each. The results are token ids int64 [rows, 1 + top], the given token first, then the best, ties by smaller id, and
    their log probabilities float64 [rows, 1 + top], NaN for a row whose highest logit is not finite.

    Raises:
        SharpError: the native library is missing, or refuses the arguments.
    """
    vocab = logits.shape[1]
    logits = np.ascontiguousarray(logits)
    places = np.array(rows, np.int64)
    found, values = np.empty((len(rows), 1 + top), np.int64), np.empty((len(rows), 1 + top), np.float64)
    found[:, 0] = token_ids
    call = _library().sharp_logprobs
    _check(call(logits.ctypes, vocab, places.ctypes, len(rows), top, found.ctypes, values.ctypes))
    return found, values


@cache
def _library() -> ctypes.CDLL:
    """Return the native library with the signatures of its sampling functions set.

    Raises:
        SharpError: the library is missing, cannot be loaded, or lacks a function.
    """
    path = library_path("onnxruntime")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    try:
        library = ctypes.CDLL(path)
        _ = library.sharp_sample, library.sharp_logprobs
    except (OSError, AttributeError) as error:
        raise SharpError(f"{path} cannot be used as Sharp's kernel library: {error}; install Sharp again") from error
    library.sharp_sample.argtypes = [pointer, number, number, pointer, pointer]
    library.sharp_logprobs.argtypes = [pointer, number, pointer, number, number, pointer, pointer]
    for function in (library.sharp_sample, library.sharp_logprobs):
        function.restype = ctypes.c_char_p
    return library


def _check(error: bytes | None) -> None:
    """Raise SharpError with the text that a function of the library returned; None means success."""
    if error is not None:
        raise SharpError(error.decode())
