"""`python -m bench.certified`: how much of the cache must be read for an output whose error is certified?

Where no weight is zero, keys and values of small weight could be taken from copies in 8 bits. This is a study in numpy,
on queries, keys and values of SmolLM2: no kernel does it. docs/key-screen.md has the result.

**The bound.** A row reads the set E in full and the others, R, from the copies: a key's logit lies in [l, u] with the
middle m (`plugins/op/key_screen.py`), its value is v = v' + e with |e| <= r. With a = g(z) in E and g(m) in R, g the
normalizer before its sum (e^z, or SSA's), and the output o' = sum a v' / sum a, the true weights are a (1 + d) with
|d| <= h = max(g(u) / g(m) - 1, 1 - g(l) / g(m)). As sum a (v' - o') = 0,

    |o - o'| <= sum over R of a (h (|v' - o'| + r) + r) / (sum over E of a + sum over R of g(l)).

R is what has the smallest terms, as many as fit the tolerance. Adaptive temperature is counted as if its temperature
were known, so its figures are lower bounds.

Beside them stands entmax with its screen, whose error is 0.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from bench.attention_data import LayerInputs, captured, smollm2
from bench.result_file import header, write
from sharp.plugins.op.key_screen import Screen, in_doubt, intervals, screen_of
from sharp.plugins.op.normalizers import Normalizer, normalize
from sharp.plugins.op.schema import DEFAULT_ALPHA

Floats = NDArray[np.float64]
STRIP = 16  # keys that a kernel reads together
SSA_B, SSA_N = 1.0, 2.0


def _softmax(z: Floats, highest: float) -> Floats:
    """Return softmax's weights of logits before their division by the sum, relative to the highest."""
    return np.exp(z - highest)


def _ssa(z: Floats, _highest: float) -> Floats:
    """Return SSA's weights of logits before their division by the sum."""
    return (1 + SSA_B * np.abs(z)) ** (SSA_N * np.sign(z))


def inverse_temperature(z: Floats) -> float:
    """Return the inverse temperature of adaptive temperature for a row of logits [n]."""
    _, statistics = normalize(z, Normalizer("adaptive_softmax"))
    return statistics.inverse_temperature


def read_in_full(
    g: Callable[[Floats, float], Floats],
    beta: float,
    z: Floats,
    ends: tuple[Floats, Floats],
    values: tuple[Floats, Floats, Floats],
    tolerance: float,
) -> NDArray[np.bool_]:
    """Return which of n keys must be read in full, bool [n], for one row of attention.

    Args:
        g: the normalizer before its sum, called as g(logits, an upper bound of all logits).
        beta: inverse temperature.
        z: logits [n].
        ends: the lower and upper ends of the intervals of z that the copies give, [n] each.
        values: the values [n, dim], their copies in 8 bits, and bounds [n] on what the copies leave out.
        tolerance: the limit of |o - o'|, divided by the largest |v|.
    """
    low, high = (beta * end for end in ends)
    highest = float(high.max())
    value, copy, rest = values
    exact = g(beta * z, highest)
    middle, least = g((low + high) / 2, highest), g(low, highest)
    output, limit = exact @ value / exact.sum(), tolerance * float(np.linalg.norm(value, axis=1).max())
    relative = np.maximum(g(high, highest) / middle - 1, 1 - least / middle)
    away = np.linalg.norm(copy - output, axis=1) + limit  # because |o - o'| is at most the limit
    terms = middle * (relative * (away + rest) + rest)
    order = np.argsort(terms)
    sums = np.cumsum(terms[order])
    total = np.cumsum(least[order]) + (exact.sum() - np.cumsum(exact[order]))
    few = int(np.searchsorted(sums / total, limit))
    full = np.ones(len(z), bool)
    full[order[:few]] = False
    return full


def measure(layer: LayerInputs, tokens: int, queries: int, tolerance: float) -> dict[str, dict[str, float]]:
    """Return the shares of keys and strips that the query heads of a KV head need, for the last `queries` of `tokens`.

    The result has, for each normalizer, means over KV heads and queries: keys, and strips of 16 keys with at least one
    such key. `tokens` is a multiple of 16; `tolerance` is that of `read_in_full`.
    """
    data = layer.context(tokens)
    group = data.query.shape[1] // data.key.shape[1]
    found: dict[str, list[NDArray[np.bool_]]] = {"softmax": [], "ssa": [], "adaptive_softmax": [], "entmax": []}
    for head in range(data.key.shape[1]):
        key, value = data.key[:, head], data.value[:, head].astype(np.float64)
        shift = key.mean(0)
        screen, values = screen_of(key, shift), screen_of(data.value[:, head], np.zeros_like(shift))
        copy = values.scale[:, None].astype(np.float64) * values.integers
        for row in range(tokens - queries, tokens):
            seen = slice(0, row + 1)
            part = Screen(screen.integers[seen], screen.scale[seen], screen.distance[seen])
            needed = {name: np.zeros(tokens, bool) for name in found}
            for query in data.query[row, head * group : (head + 1) * group] * key.shape[1] ** -0.5:
                ends = intervals(query, part, shift)
                needed["entmax"][seen] |= in_doubt(*ends, DEFAULT_ALPHA)
                z = key[seen].astype(np.float64) @ query
                rows = (value[seen], copy[seen], values.distance[seen].astype(np.float64))
                for name, g, beta in (
                    ("softmax", _softmax, 1.0),
                    ("ssa", _ssa, 1.0),
                    ("adaptive_softmax", _softmax, inverse_temperature(z)),
                ):
                    needed[name][seen] |= read_in_full(g, beta, z, ends, rows, tolerance)
            for name, keys in needed.items():
                found[name].append(keys)
    return {
        name: {
            "keys": float(np.mean([keys.mean() for keys in rows])),
            "strips": float(np.mean([keys.reshape(-1, STRIP).any(1).mean() for keys in rows])),
        }
        for name, rows in found.items()
    }


@click.command()
@click.option("--contexts", default="4096,32768,131072", show_default=True, help="Tokens.")
@click.option("--queries", default=4, show_default=True, help="The last ones, of each layer and head.")
@click.option("--layers", default=10, show_default=True)
@click.option("--tolerance", default=1e-3, show_default=True, help="Error over the largest value's length.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(contexts: str, queries: int, layers: int, tolerance: float, output: Path | None) -> None:
    """Measure the share of SmolLM2's keys that attention must read in full, with 8-bit copies of all keys."""
    chosen = captured(smollm2(), "softmax")[:layers]
    dim = chosen[0].key.shape[2]
    copy = (dim + 8) / (8 * dim)  # bytes of a copy of keys or of values, divided by those of both in full
    rows: list[dict[str, Any]] = []
    for tokens in map(int, contexts.split(",")):
        by_layer = [measure(layer, tokens, queries, tolerance) for layer in chosen]
        for name in by_layer[0]:
            keys, strips = (float(np.mean([shares[name][of] for shares in by_layer])) for of in ("keys", "strips"))
            copies = copy if name == "entmax" else 2 * copy  # entmax needs no copy of the values
            rows.append(
                {
                    "context": tokens,
                    "normalizer": name,
                    "keys_read_in_full": keys,
                    "strips_read_in_full": strips,
                    "bytes_float32": copies + keys,
                    "bytes_float32_strips": copies + strips,
                    "bytes_float16": 2 * copies + keys,
                }
            )
            print(rows[-1], flush=True)
    found = header("certified") | {"tolerance": tolerance, "queries": queries, "layers": len(chosen), "rows": rows}
    write(output, found)


if __name__ == "__main__":
    main()
