"""The sampling kernel on a GPU: its tokens compared with the definition in float64, and its time with torch's."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu.cases import Cases
from bench.gpu.speed import time_call
from sharp.plugins.cpu.sampling import CHANGE, Changes
from sharp.plugins.triton import sampling as kernel

VOCABULARIES = (49_152, 128_256, 151_937)  # the last is odd, so that its rows are not aligned
ROWS = (1, 64)
SPREAD = 2.5  # standard deviation of the logits
FILTERS = {  # sharpness, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "min-p": (1.0, 0, 1.0, 0.05),
    "top-k": (1.0, 50, 1.0, 0.0),
    "top-p": (1.0, 0, 0.95, 0.0),
    "top-k, top-p": (1.0, 50, 0.95, 0.0),
    "penalties": (1.0, 0, 1.0, 0.0),
}
PENALIZED = 1000  # number of penalized tokens of a row
NEAR = 1e-5  # the distance of a random number to its token's border within which another token is accepted


def sampling(quick: bool, cases: Cases) -> Iterator[dict[str, Any]]:
    """Yield a row for each vocabulary, number of rows and filter.

    The entries are microseconds (of all rows of a step), wrong (rows whose token is not the definition's), holds (none
    is wrong, and a second run gives the same tokens) and, where torch has a peer, torch_microseconds.
    """
    for vocab in VOCABULARIES[1:2] if quick else VOCABULARIES:
        for rows in ROWS:
            for name in FILTERS:
                named = {"vocab": vocab, "rows": rows, "filters": name}
                yield from cases.run(named, partial(_sample, vocab, rows, name))


def _sample(vocab: int, rows: int, name: str) -> Iterator[dict[str, Any]]:
    """Yield one row for `rows` rows and the filter `name`: number of wrong tokens, repeatability, and time."""
    generator = torch.Generator("cuda").manual_seed(vocab + rows)
    logits = SPREAD * torch.randn((rows, vocab), device="cuda", generator=generator)
    randoms = torch.rand((rows, 1), dtype=torch.float64, device="cuda", generator=generator)
    filters = torch.tensor([FILTERS[name]] * rows, dtype=torch.float64, device="cuda")
    samplings = torch.cat([filters, randoms], 1)
    changes = _penalties(rows, min(PENALIZED, vocab) if name == "penalties" else 0, vocab)
    tokens = kernel.sample(logits.clone(), samplings, changes=changes).tolist()
    again = kernel.sample(logits.clone(), samplings, changes=changes).tolist()
    changed = logits.cpu().numpy().copy()
    changes.apply(changed)
    pairs = zip(changed, samplings.cpu().numpy(), tokens, strict=True)
    wrong = sum(misplacement(*pair) > NEAR for pair in pairs)
    indices = torch.arange(rows, device="cuda")
    candidates = torch.empty((rows, kernel.CONSTANTS["CANDIDATES"]), device="cuda")
    sampled = torch.empty(rows, dtype=torch.int64, device="cuda")
    idle = changes.entries.copy()  # the kernel changes logits in place, but timed logits must stay
    idle["repetition"], idle["amount"] = 1, 0
    starts = torch.tensor(changes.starts, device="cuda")
    words = torch.tensor(idle.view(np.int32), device="cuda")
    timing = time_call(lambda: kernel.launch(logits, indices, samplings, starts, words, candidates, sampled))
    row = {"holds": wrong == 0 and tokens == again, "wrong": wrong, "microseconds": timing.median * 1e3}
    peer: Callable[[], Any] | None = None
    if name == "greedy":
        peer = partial(torch.argmax, logits, 1)
    elif name == "temperature":

        def peer() -> torch.Tensor:
            """Sample one token per row by torch.multinomial, for comparison."""
            return torch.multinomial(torch.softmax(logits, 1), 1)

    yield row | ({"torch_microseconds": time_call(peer, graph=False).median * 1e3} if peer else {})


def _penalties(rows: int, tokens: int, vocab: int) -> Changes:
    """Return changes of the logits: a repetition and a frequency penalty for `tokens` random tokens of each row."""
    random = np.random.default_rng(rows)
    parts = []
    for _ in range(rows):
        entries = np.zeros(tokens, CHANGE)
        entries["token"] = random.permutation(vocab)[:tokens]
        entries["repetition"], entries["amount"] = 1.1, 0.5
        parts += [np.empty(0, CHANGE), entries]
    return Changes.of(parts)


def misplacement(logits: NDArray[np.float32], parameters: NDArray[np.float64], token: int) -> float:
    """Return how far the random number is from those of the token, as a share of the kept weights; 0 is right.

    `logits` are [vocab], `parameters` sharpness, top_k, top_p, min_p and the random number. A token that is not kept,
    or under sharpness 0 is not the likeliest, gives infinity.
    """
    sharpness, top_k, top_p, min_p, random = parameters.tolist()
    if sharpness == 0:
        return 0.0 if token == int(logits.argmax()) else np.inf
    weights = np.exp((logits.astype(np.float64) - logits.max()) * sharpness)
    descending = np.sort(weights)[::-1]
    lowest = descending[int(top_k) - 1] if 0 < top_k < len(weights) else 0.0
    if top_p < 1:
        cumulated = np.cumsum(descending[descending >= lowest])
        lowest = descending[np.searchsorted(cumulated, top_p * cumulated[-1])]
    kept = np.where(weights >= max(lowest, min_p), weights, 0.0)
    if kept[token] == 0:
        return np.inf
    cumulated = np.cumsum(kept) / kept.sum()
    return max(cumulated[token] - kept[token] / kept.sum() - random, random - cumulated[token], 0.0)
