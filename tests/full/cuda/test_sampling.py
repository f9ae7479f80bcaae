"""The GPU's sampler, with an interpreted kernel, from a call to its tokens."""

import shutil

import numpy as np

from tests.full.cuda.test_computing import run

VOCAB = 300


def test_tokens_are_those_of_the_cpu(libraries):
    random = np.random.default_rng(3)

    def part():
        tokens = random.choice(VOCAB, int(random.integers(0, 40)), replace=False)
        return [(int(token), random.choice([0.5, -np.inf]), 1.3, random.normal()) for token in tokens]

    def call(rows, changed):
        logits = random.normal(0, 3, (rows + 2, VOCAB)).astype(np.float32)
        logits[1] = -np.inf
        filters = [(0, 1, 0), (5, 1, 0), (0, 0.8, 0), (5, 0.8, 0.05), (0, 1, 0.1)]
        parameters = [(row % 4 and 0.8, *filters[row % 5], random.random()) for row in range(rows)]
        indices = random.integers(0, rows + 2, rows)
        indices[0] = 1
        if changed:  # with changes, each row is sampled once
            indices = random.permutation(rows + 2)[:rows]
        parts = [part() for _ in range(2 * rows)] if changed else []
        return logits.tolist(), indices.tolist(), parameters, parts

    calls = [call(3, False), call(20, True), call(70, False), call(70, True), call(1, False)]
    said = run("compute_sampling", libraries, libraries / "libsharp_cuda.so", given=calls)
    assert not said["failures"]
    assert said["launches"] == ["sample_rows"] * 5
    for tokens in said["calls"]:
        assert tokens["gpu"] == tokens["cpu"]
    assert -1 in said["calls"][2]["gpu"]


def test_tensorrts_logits_are_sampled_on_its_gpu(libraries, hashing, tmp_path):
    folder = shutil.copytree(hashing, tmp_path / "model")
    said = run("compute_tensorrt", libraries, folder, libraries)
    assert not said["failures"]
    assert set(said["launches"]) == {"sample_rows"} and len(said["launches"]) >= 3 * 4
    assert said["gpu"]["tokens"] == said["host"]["tokens"]
    assert said["gpu"]["copied"] == [] and said["host"]["copied"]
