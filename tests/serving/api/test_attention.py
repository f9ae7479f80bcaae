"""The entropies of tokens, as a stream carries them."""

import numpy as np

from sharp.serving.api.attention import AttentionRows, TokenEntropies


def test_what_a_message_waits_with_keeps_nothing_of_the_step():
    """A message that waits to be sent keeps nothing of its step alive.

    Once a slow reader held the statistics of every step that computed one of its tokens.
    """
    stats = np.zeros((2, 64, 3, 4), np.float32)  # [layers, tokens, heads, columns]
    stats[..., 0] = np.log(8)
    rows = AttentionRows(stats, np.arange(64)).of(slice(7, 9))
    found = TokenEntropies.of(rows)
    assert found.positions.tolist() == [7, 8]
    assert found.entropy.dtype == np.float32 and found.entropy.shape == (2, 2, 3)
    np.testing.assert_allclose(found.entropy[:, 0, 0], [1, np.log(8) / np.log(9)], rtol=1e-6)
    assert not np.shares_memory(found.entropy, stats) and not np.shares_memory(found.positions, rows.positions)
    assert found.entropy.base is None or found.entropy.base.size == found.entropy.size
