"""The entropies of tokens that a stream carries."""

import numpy as np

from sharp.serving.api.attention import AttentionRows, TokenEntropies


def test_what_a_message_waits_with_keeps_nothing_of_the_step():
    """A reader that is slow held the statistics of every step that its tokens were a part of."""
    stats = np.zeros((2, 64, 3, 4), np.float32)  # layers, tokens, heads, columns
    stats[..., 0] = np.log(8)
    rows = AttentionRows(stats, np.arange(64)).of(slice(7, 9))
    found = TokenEntropies.of(rows)
    assert found.positions.tolist() == [7, 8]
    assert found.entropy.dtype == np.float32 and found.entropy.shape == (2, 2, 3)
    np.testing.assert_allclose(found.entropy[:, 0, 0], [1, np.log(8) / np.log(9)], rtol=1e-6)
    assert not np.shares_memory(found.entropy, stats) and not np.shares_memory(found.positions, rows.positions)
    assert found.entropy.base is None or found.entropy.base.size == found.entropy.size
