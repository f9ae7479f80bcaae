"""`bench.certified` computes an output from full-precision rows and 8-bit copies with an error within its tolerance."""

import numpy as np
import pytest

from bench.certified import _softmax, _ssa, read_in_full
from sharp.plugins.op.key_screen import intervals, screen_of


@pytest.mark.parametrize("g", [_softmax, _ssa])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_error_is_within_the_tolerance(g, spread):
    read_keys = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        keys, values = (rng.standard_normal((200, 16)).astype(np.float32) for _ in range(2))
        query, shift = (rng.standard_normal(16) * spread).astype(np.float32), keys.mean(0)
        screen, copies = screen_of(keys, shift), screen_of(values, np.zeros(16))
        copy = copies.scale[:, None].astype(np.float64) * copies.integers
        ends = intervals(query, screen, shift)
        logits, exact = keys.astype(np.float64) @ query, values.astype(np.float64)
        full = read_in_full(g, 1.0, logits, ends, (exact, copy, copies.distance.astype(np.float64)), 0.01)
        read_keys.append(int(full.sum()))

        highest = float(ends[1].max())
        true = g(logits, highest)
        read = np.where(full, true, g((ends[0] + ends[1]) / 2, highest))
        output = read @ np.where(full[:, None], exact, copy) / read.sum()
        error = np.linalg.norm(true @ exact / true.sum() - output)
        assert error <= 0.01 * np.linalg.norm(exact, axis=1).max()
        assert error > 0  # some rows were read from the 8-bit copies
    assert 0 < sum(read_keys) < 20 * 200
