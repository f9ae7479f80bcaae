"""Comparison of every kernel with float64, in every dtype; nothing is timed."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from bench.gpu.cases import Cases
from bench.gpu.compilation import Compilations, options_of
from bench.gpu.inputs import Call, expected, expected_row, make_call, on_host, run, to_numpy
from sharp.plugins.op.attributes import DEFAULT_ALPHA, NORMALIZERS

# (context, new tokens): decode over a long and no context, a chunk behind a context, a prompt of several tiles.
MIXED = ((3000, 1), (0, 1), (37, 5), (200, 40), (0, 150), (700, 1))
# Several tokens of a sequence, but so few in all that decoding takes them together.
FEW = ((3000, 2), (0, 3), (37, 4), (700, 1))
PROMPT = ((0, 2048), (300, 1))
SEQUENCES = {"mixed": MIXED, "few": FEW, "prompt of 2,048": PROMPT}
HEADS = {"q_heads": 6, "kv_heads": 2}
# ||output - expected|| / ||expected||: rounding of the inputs' products, of the weights and of the output.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ENTMAX_ENTROPY = (
    1.2e-2  # nats, in bfloat16 at alpha 1.5, where a prompt's threshold is an estimate (`Options.estimates`)
)
LARGE = {
    "decode of 131,072": ((131_071, 1), (60_000, 1)),
    "decode of 131,072 beside 31 of 200": ((131_071, 1), *(((200, 1),) * 31)),
    "2 to 4 tokens behind 60,000": ((60_000, 2), (59_000, 3), (61_000, 4)),
    "prompt of 8,192": ((0, 8192),),
    "40 tokens behind 131,032": ((131_032, 40), (60_000, 1)),  # a prompt whose keys are split
}
ROWS = 12  # rows of a large call that are compared


def small_cases(quick: bool) -> list[dict[str, Any]]:
    """Return the arguments of `make_case` for every normalizer in every dtype, every head dim and every option."""
    cases: list[dict[str, Any]] = []
    dims = (64,) if quick else (64, 128)
    dtypes = (torch.bfloat16, torch.float32) if quick else tuple(TOLERANCES)
    cases += [{"normalizer": n, "dtype": t, "head_dim": d} for d in dims for t in dtypes for n in NORMALIZERS]
    others = (80,) if quick else (80, 96, 256)
    cases += [
        {"normalizer": n, "head_dim": d} for d in others for n in ("softmax", "ssa", "adaptive_softmax", "entmax")
    ]
    for normalizer in ("softmax", "entmax") if quick else NORMALIZERS:
        cases.append({"normalizer": normalizer, "head_dim": 64, "alibi": True, "softcap": 5.0, "window": 150})
    cases += [{"normalizer": "entmax", "head_dim": 64, "alpha": alpha} for alpha in (1.25, 2.0)]
    few = ("softmax", "entmax") if quick else ("softmax", "ssa", "adaptive_softmax", "entmax")
    groups = ((2, 2), (16, 2))  # groups of one and of eight query heads; the other cases have three
    cases += [{"normalizer": n, "head_dim": 64, "q_heads": q, "kv_heads": kv} for n in few for q, kv in groups]
    cases += [{"normalizer": n, "head_dim": 64, "block_size": size} for n in few for size in (32, 128)]
    cases += [{"normalizer": n, "head_dim": 64, "sequences": "prompt of 2,048"} for n in few]
    scaled = (torch.int8, torch.float8_e4m3fn)
    caches = scaled if quick else (*scaled, torch.float16, torch.bfloat16)
    for normalizer in ("softmax", "entmax") if quick else NORMALIZERS:
        cases += [{"normalizer": normalizer, "dtype": torch.float32, "head_dim": 64, "cache_dtype": c} for c in caches]
        cases += [
            {"normalizer": normalizer, "dtype": t, "head_dim": 64, "cache_dtype": c}
            for t in (torch.bfloat16, torch.float16)
            for c in scaled
        ]
    tokens = [{"normalizer": n, "head_dim": d, "sequences": "few"} for d in dims for n in NORMALIZERS]
    tokens += [
        {"normalizer": "entmax", "dtype": torch.float32, "head_dim": 64, "sequences": "few", "cache_dtype": c}
        for c in caches
    ]
    screened = [
        {
            "normalizer": "entmax",
            "dtype": t,
            "head_dim": d,
            "sequences": s,
            "spread": 3.0,
            "screened": True,
            "statistics": c,
        }
        for d in dims
        for t in dtypes
        for s, c in (("mixed", True), ("few", False))
    ]
    return [{"dtype": torch.bfloat16, "statistics": True, **case} for case in cases + tokens + screened]


STATISTICS = ("entropy", "support", "inverse_temperature", "logit_spread", "sink_mass")


def make_case(sequences: str | Sequence[Sequence[int]] = "mixed", **case: Any) -> Call:
    """Return the call of one of `small_cases`, or of (context, tokens) of every sequence."""
    chosen = SEQUENCES[sequences] if isinstance(sequences, str) else sequences
    return make_call(sequences=chosen, **(HEADS | case))


def compare(
    call: Call, references: tuple[np.ndarray, ...], launch: Callable[[Call], tuple[torch.Tensor, ...]] = run
) -> dict[str, Any]:
    """Return the errors of Sharp's kernels, or of `launch`, and in `holds` whether they are those of rounding.

    `references` are those of `inputs.expected`, of the call before it changed. The errors are output (the relative norm
    of its error), output_by_sequence, caches (0 if caches, scales and screen are equal, else 1), not_numbers (NaN in
    output and statistics), and the largest difference in each column of the statistics: entropy in nats, support in
    keys, inverse temperature, logit spread, and the sink's share where there is a sink.
    """
    starts = call.tensors["query_start"].tolist()
    output, *caches, stats = map(on_host, launch(call))
    by_sequence = [
        np.linalg.norm(output[first:end] - references[0][first:end]) / np.linalg.norm(references[0][first:end])
        for first, end in pairwise(starts)
    ]
    errors = {
        "output": float(np.linalg.norm(output - references[0]) / np.linalg.norm(references[0])),
        "caches": float(not all(np.array_equal(a, b) for a, b in zip(caches, references[1:-1], strict=True))),
        **statistics_errors(stats, references[-1]),
        "output_by_sequence": [float(f"{error:.2g}") for error in by_sequence],  # tells decode from prefill
        "not_numbers": int(np.isnan(output).sum() + np.isnan(stats).sum()),
    }
    return {**errors, "holds": _holds(errors, call)}


def entropy_limit(call: Call) -> float:
    """Return the largest error of a row's entropy, in nats, that rounding may cause."""
    estimated = call.normalizer == "entmax" and call.attributes.get("alpha", DEFAULT_ALPHA) == 1.5
    return ENTMAX_ENTROPY if estimated and call.tensors["query"].dtype == torch.bfloat16 else 2e-3


def statistics_errors(stats: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return the largest absolute difference in each column of the statistics [..., 4 or 5], by the column's name."""
    columns = np.abs(stats - expected).reshape(-1, stats.shape[-1]).max(0)
    return dict(zip(STATISTICS, map(float, columns), strict=False))


def statistics_limits(call: Call) -> dict[str, float]:
    """Return how far the columns of the statistics may be from the reference's, absolutely, by the column's name."""
    entropy = entropy_limit(call)
    return dict(zip(STATISTICS, (entropy, 2.0, 2e-3, 2e-3, entropy), strict=True))


def _holds(errors: dict[str, Any], call: Call) -> bool:
    """Whether the errors are those of rounding; a NaN never is."""
    limits = {"output": TOLERANCES[call.tensors["query"].dtype], "caches": 0.0, **statistics_limits(call)}
    return all(errors[name] <= limits[name] for name in limits.keys() & errors.keys())


def check_small(
    quick: bool, executor: Executor, capability: int, cases: Cases, device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """Yield a row for each of `small_cases`, with the errors of `compare`.

    References and compilation for `capability` (90 is 9.0) run in the executor's processes, all at once.
    """
    listed = small_cases(quick)
    calls = {number: make_case(device=device, **case) for number, case in enumerate(listed) if number >= cases.done}
    compilations = Compilations(executor, capability)
    references: dict[int, Future[tuple[np.ndarray, ...]]] = {}
    for number, call in calls.items():
        compilations.begin(options_of(call))
        references[number] = submit(executor, expected, to_numpy(call.tensors), call.normalizer, call.attributes)

    def check(number: int) -> Iterator[dict[str, Any]]:
        """Yield the row of errors of call `number` against its reference."""
        yield compare(calls[number], computed(references[number], calls[number], expected))

    for number, case in enumerate(listed):
        named = {name: str(value).removeprefix("torch.") for name, value in case.items()}
        yield from cases.run(
            named, partial(check, number), lambda number=number: compilations.finish(options_of(calls[number]))
        )


def submit(executor: Executor, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Submit a function to the executor; if one of its processes has crashed, return a future with that error."""
    try:
        return executor.submit(function, *arguments)
    except BrokenExecutor as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def computed(reference: Future[Any], call: Call, expected: Callable[..., Any]) -> Any:
    """Return the result of `reference`, or compute it here if a process of the executor has crashed, as compilers do.

    `expected` computes it from the call's arrays, normalizer and attributes.
    """
    try:
        return reference.result()
    except BrokenExecutor:
        return expected(to_numpy(call.tensors), call.normalizer, call.attributes)


def check_large(executor: Executor, capability: int, cases: Cases) -> Iterator[dict[str, Any]]:
    """Yield a row for each case of `LARGE`: the errors of 12 random rows of the output, and whether bits repeat.

    The entries are output (relative error), entropy (largest difference in nats), same_bits (of a second run and of a
    CUDA graph) and holds.
    """
    compilations = Compilations(executor, capability)
    kinds = [(n, dim) for n in ("softmax", "ssa", "adaptive_softmax", "entmax") for dim in (128, 64)]
    options = {
        (n, dim): options_of(make_call(n, ((1, 1),), head_dim=dim, statistics=True, device="cpu")) for n, dim in kinds
    }
    for kind in kinds:
        compilations.begin(options[kind])
    for name in LARGE:
        for kind in kinds:
            named = {"normalizer": kind[0], "sequences": name, "head_dim": kind[1]}
            yield from cases.run(
                named, partial(_large, kind[0], name, kind[1]), partial(compilations.finish, options[kind])
            )


def _large(normalizer: str, name: str, head_dim: int) -> Iterator[dict[str, Any]]:
    """Yield one row: errors of random rows of the large case `name`, and whether a second run repeats the bits."""
    call = make_call(normalizer, LARGE[name], head_dim=head_dim, statistics=True, spread=2.0)
    output, *_, stats = (tensor.clone() for tensor in run(call))
    same = {"second run": torch.equal(output, run(call)[0]), "graph": torch.equal(output, replayed(call))}
    generator = np.random.default_rng(0)
    error = size = entropy = 0.0
    for _ in range(ROWS):
        token, head = int(generator.integers(output.shape[0])), int(generator.integers(output.shape[1]))
        reference, statistics = expected_row(call, token, head)
        found = output[token, head].double().cpu().numpy()
        error += float(((found - reference) ** 2).sum())
        size += float((reference**2).sum())
        entropy = max(entropy, abs(float(stats[token, head, 0]) - statistics[0]))
    relative = (error / size) ** 0.5
    yield {
        "output": relative,
        "entropy": entropy,
        "same_bits": same,
        "holds": relative <= TOLERANCES[torch.bfloat16] and entropy <= entropy_limit(call) and all(same.values()),
    }


def replayed(call: Call) -> torch.Tensor:
    """Return the output of a CUDA graph of the call, replayed; the call's caches change as in `run`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(call)[0]
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return output
