"""The checks of correctness in `bench/gpu/run.py`, on a tiny case, in the interpreter's process."""

from typing import Any


def check_attention(form: str, queries: int, new_keys: int) -> dict[str, Any]:
    """Return the bench's comparison of a case of op SharpAttention, and whether a wrong output passes it."""
    import torch

    from bench.gpu.attention import compare, expected, make_call
    from bench.gpu.inputs import to_numpy

    call = make_call("entmax", form, queries, new_keys, past=70, dtype=torch.float32, head_dim=16, device="cpu")
    reference = expected(to_numpy(call.tensors), call.normalizer, call.attributes)
    return {"right": compare(call, reference), "wrong": compare(call, (reference[0] * 1.01, *reference[1:]))["holds"]}


def check(normalizer: str, cache_dtype: str | None = None, screened: bool = False) -> dict[str, Any]:
    """Return whether right, wrong and NaN outputs pass, and how far a row of a large call is from float64."""
    import numpy as np
    import torch

    from bench.gpu.correctness import compare
    from bench.gpu.inputs import expected, expected_row, make_call, run, to_numpy

    cache = getattr(torch, cache_dtype) if cache_dtype else None
    options: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    options |= {"cache_dtype": cache, "screened": screened}
    call = make_call(normalizer, ((40, 1), (5, 3)), statistics=True, alibi=True, window=30, **options)
    reference = expected(to_numpy(call.tensors), call.normalizer, call.attributes)
    wrong = (reference[0] + np.eye(*reference[0].shape[1:]) * 0.01, *reference[1:])
    output, *_, stats = run(call)
    row, statistics = (0.0, 0.0) if cache else expected_row(call, 2, 1)
    return {
        "right": compare(call, reference)["holds"],
        "wrong": compare(call, wrong)["holds"],
        "nan": compare(call, (reference[0] * np.nan, *reference[1:]))["holds"],
        "row": float(np.abs(output[2, 1].numpy() - row).max()),
        "statistics": float(np.abs(stats[2, 1].numpy() - statistics).max()),
    }
