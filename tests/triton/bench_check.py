"""What `bench/gpu.py` does for correctness, on a tiny case; runs in the interpreter's process."""

import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"


def check(normalizer: str) -> dict[str, Any]:
    """Whether a right and a wrong answer are told apart, and how far rows of a large call are from float64."""
    sys.path.insert(0, str(BENCH))
    import numpy as np
    import torch
    from gpu_correctness import compare, holds
    from gpu_inputs import expected, expected_row, make_call, run, to_numpy

    options: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    call = make_call(normalizer, ((40, 1), (5, 3)), statistics=True, alibi=True, window=30, **options)
    answer = expected(to_numpy(call.tensors), call.normalizer, call.attributes)
    wrong = (answer[0] + np.eye(*answer[0].shape[1:]) * 0.01, *answer[1:])
    output, _, _, stats = run(call)
    row, statistics = expected_row(call, 2, 1)
    return {
        "right": holds(compare(call, answer), torch.float32),
        "wrong": holds(compare(call, wrong), torch.float32),
        "nan": holds(compare(call, (answer[0] * np.nan, *answer[1:])), torch.float32),
        "row": float(np.abs(output[2, 1].numpy() - row).max()),
        "statistics": float(np.abs(stats[2, 1].numpy() - statistics).max()),
    }
