"""Draws tokens from logits, and says how likely tokens are, in native code (`plugins/cpu/sampling.cc`)."""

import ctypes
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sharp.plugins import library_path
from sharp.plugins.errors import SharpError

# How a token is drawn: `SharpSampling` of sampling.h. A sharpness (1 / temperature) of 0 takes the most likely token;
# top_k 0, top_p 1 and min_p 0 keep all tokens; `random` is from 0 to below 1.
SAMPLING = np.dtype(
    [
        ("sharpness", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("random", np.float64),
    ]
)
NO_TOKEN = -1


def sample(logits: NDArray[np.float32], samplings: NDArray[np.void]) -> NDArray[np.int64]:
    """Draw a token per row: logits float32 [rows, vocab], samplings SAMPLING [rows] -> int64 [rows].

    Tokens are drawn from softmax(sharpness * logits) after top-k, top-p and min-p, one after the other. Tokens that tie
    with the last one that is kept are kept too. With the kept tokens in the order of their ids, the first one is taken
    whose cumulated probability is more than `random`. A row whose highest logit is not finite has NO_TOKEN.
    """
    rows, vocab = logits.shape
    logits = np.ascontiguousarray(logits)
    chosen = np.empty(rows, np.int64)
    _check(_library().sharp_sample(logits.ctypes, rows, vocab, samplings.ctypes, chosen.ctypes))
    return chosen


def most_likely(
    logits: NDArray[np.float32], rows: NDArray[np.int64], top: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The `top` (at most vocab) most likely tokens of some rows of logits float32 [n, vocab], and their normalizers.

    Tokens int64 [rows, top], best first and the smaller id of equals; ln sum e^logit float64 [rows]. A row whose
    highest logit is not finite has a normalizer of NaN.
    """
    vocab = logits.shape[1]
    logits = np.ascontiguousarray(logits)
    found, normalizers = np.empty((len(rows), top), np.int64), np.empty(len(rows), np.float64)
    call = _library().sharp_most_likely
    _check(call(logits.ctypes, vocab, rows.ctypes, len(rows), top, found.ctypes, normalizers.ctypes))
    return found, normalizers


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(library_path("onnxruntime"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.sharp_sample.argtypes = [pointer, number, number, pointer, pointer]
    library.sharp_most_likely.argtypes = [pointer, number, pointer, number, number, pointer, pointer]
    for function in (library.sharp_sample, library.sharp_most_likely):
        function.restype = ctypes.c_char_p
    return library


def _check(error: bytes | None) -> None:
    if error is not None:
        raise SharpError(error.decode())
