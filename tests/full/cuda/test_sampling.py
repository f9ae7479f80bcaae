"""The sampler of a GPU, whose kernel is interpreted, on the way from a call to its tokens."""

import numpy as np

from tests.full.cuda.test_computing import run

VOCAB = 300


def test_tokens_are_those_of_the_cpu(libraries):
    random = np.random.default_rng(3)

    def call(rows):
        logits = random.normal(0, 3, (rows + 2, VOCAB)).astype(np.float32)
        logits[1] = -np.inf
        filters = [(0, 1, 0), (5, 1, 0), (0, 0.8, 0), (5, 0.8, 0.05), (0, 1, 0.1)]
        parameters = [(row % 4 and 0.8, *filters[row % 5], random.random()) for row in range(rows)]
        return logits.tolist(), random.integers(0, rows + 2, rows).tolist(), parameters

    said = run("compute_sampling", libraries, libraries / "libsharp_cuda.so", given=[call(n) for n in (3, 20, 70, 1)])
    assert not said["failures"]
    assert said["launches"] == ["sample_rows"] * 4
    for tokens in said["calls"]:
        assert tokens["gpu"] == tokens["cpu"]
    assert -1 in said["calls"][2]["gpu"]
