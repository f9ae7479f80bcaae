"""Times on a GPU: our kernels, their peers, and the machine's own limits. Medians of CUDA-event times."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_inputs import Call, make_call, run
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

DECODE = ("softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid")
PREFILL = ("softmax", "ssa", "adaptive_softmax", "entmax")
CONTEXTS = (1024, 8192, 32_768, 131_072, 1_048_576)
PROMPTS = (1024, 8192, 32_768, 131_072)
BATCHES = (1, 8, 32)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SPREAD = 2.0  # standard deviation of the logits; the support that entmax finds in them is in the row
COLD_BYTES = 400 << 20  # of caches that take turns, so that none is found in the second-level cache
MOST_BYTES = 16 << 30
SAMPLE_MILLISECONDS = 300.0


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median and best of the repeats, and (third quartile - first) / median."""

    median: float
    best: float
    spread: float


def time_call(call: Callable[[], Any], graph: bool = True) -> Timing:
    """Median time of a call; as a CUDA graph there is no time between its launches."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    replay = call
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        replay = captured.replay
    replay()
    first = _milliseconds(replay)
    repeats = min(max(int(SAMPLE_MILLISECONDS / max(first, 1e-3)), 5), 100)
    times = sorted(_milliseconds(replay) for _ in range(repeats))
    median = statistics.median(times)
    return Timing(median, times[0], (times[len(times) * 3 // 4] - times[len(times) // 4]) / median)


def machine() -> Iterator[dict[str, Any]]:
    """What the machine can do: bytes copied (read and written) and bfloat16 matrix products, a second."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copied = time_call(lambda: target.copy_(source))
    yield {"what": "copy", "gb_per_second": 2 * source.numel() / copied.median / 1e6}
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = time_call(lambda: a @ b)
    yield {"what": "matrix product", "tflops": 2 * 8192**3 / product.median / 1e9}


def decode(quick: bool, timely: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """One token for every sequence: microseconds a layer, and bytes of keys and values a second."""
    for context in CONTEXTS[:3] if quick else CONTEXTS:
        for batch in BATCHES:
            cache = batch * context * KV_HEADS * HEAD_DIM * 2 * 2
            if cache > MOST_BYTES or not timely():
                continue
            layers = max(1, min(64, COLD_BYTES // cache))
            calls = [make_call("softmax", ((context - 1, 1),) * batch, spread=SPREAD, seed=i) for i in range(layers)]
            subjects: dict[str, Callable[[], Any]] = {
                name: _over([call.with_normalizer(name) for call in calls]) for name in DECODE
            }
            subjects |= {"torch SDPA": _sdpa_decode(batch, context, layers)}
            subjects |= _flashinfer_decode(calls, batch, context)
            for name, subject in subjects.items():
                timing = time_call(subject, graph=name != "FlashInfer")
                milliseconds = timing.median / layers
                yield {
                    "subject": name,
                    "batch": batch,
                    "context": context,
                    "microseconds_per_layer": milliseconds * 1e3,
                    "cache_gb_per_second": cache / milliseconds / 1e6,
                    "spread": timing.spread,
                    **({"support": support(calls[0].with_normalizer(name))} if name == "entmax" else {}),
                }
            del calls, subjects
            torch.cuda.empty_cache()


def prefill(quick: bool, timely: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """One prompt: milliseconds, and operations a second of its causal half."""
    for length in PROMPTS[:2] if quick else PROMPTS:
        if not timely():
            return
        call = make_call("softmax", ((0, length),), spread=SPREAD)
        subjects: dict[str, Callable[[], Any]] = {name: _over([call.with_normalizer(name)]) for name in PREFILL}
        subjects |= _sdpa_prefill(length) | _flashinfer_prefill(length) | _adasplash(length)
        for name, subject in subjects.items():
            timing = time_call(subject, graph=name not in ("FlashInfer", "AdaSplash"))
            yield {
                "subject": name,
                "length": length,
                "milliseconds": timing.median,
                "tflops": 2 * length * (length + 1) * HEADS * HEAD_DIM / timing.median / 1e9,
                "spread": timing.spread,
                **({"support": support(call.with_normalizer(name))} if name == "entmax" else {}),
            }
        torch.cuda.empty_cache()


def statistics_cost(timely: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """The same call without the input collect_stats, with it false, and with it true."""
    for phase, sequences in {"decode": ((8191, 1),) * 32, "prefill": ((0, 8192),)}.items():
        for normalizer in PREFILL:
            if not timely():
                return
            calls = {
                state: make_call(normalizer, sequences, spread=SPREAD, statistics=state)
                for state in (None, False, True)
            }
            times = {state: time_call(_over([call])).median for state, call in calls.items()}
            yield {
                "phase": phase,
                "normalizer": normalizer,
                "absent_milliseconds": times[None],
                "off_ratio": times[False] / times[None],
                "on_ratio": times[True] / times[None],
            }


def support(call: Call) -> float:
    """Mean share of the visible keys that have a weight."""
    device = call.tensors["query"].device
    stats = run(call.with_tensors(collect_stats=torch.tensor(True, device=device)))[3]
    starts, contexts = call.tensors["query_start"].tolist(), call.tensors["context_lens"].tolist()
    visible = torch.cat(
        [
            torch.arange(context + 1, context + 1 + end - first, device=device)
            for context, first, end in zip(contexts, starts[:-1], starts[1:], strict=True)
        ]
    )
    return float((stats[:, :, 1] / visible[:, None]).mean())


def _milliseconds(call: Callable[[], Any]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


def _over(calls: list[Call]) -> Callable[[], None]:
    def step() -> None:
        for call in calls:
            run(call)

    return step


def _heads(sequences: int, tokens: int, heads: int) -> Tensor:
    return torch.randn(sequences, heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)


def _sdpa_decode(batch: int, context: int, layers: int) -> Callable[[], Any]:
    query = _heads(batch, 1, HEADS)
    caches = [(_heads(batch, context, KV_HEADS), _heads(batch, context, KV_HEADS)) for _ in range(layers)]

    def step() -> None:
        for key, value in caches:
            functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return step


def _sdpa_prefill(length: int) -> dict[str, Callable[[], Any]]:
    query, key, value = _heads(1, length, HEADS), _heads(1, length, KV_HEADS), _heads(1, length, KV_HEADS)
    subjects = {}
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):

        def step(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        try:
            step()
        except RuntimeError as error:
            print(f"  torch SDPA ({name}) left out: {str(error).splitlines()[0]}")
        else:
            subjects[f"torch SDPA ({name})"] = step
    return subjects


def _flashinfer_decode(calls: list[Call], batch: int, context: int) -> dict[str, Callable[[], Any]]:
    try:
        import flashinfer
    except ImportError:
        return {}
    query = torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    pages = -(-context // 16)
    shape = (batch * pages, 2, 16, KV_HEADS, HEAD_DIM)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in calls]
    plan = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * pages
    last = torch.full((batch,), (context - 1) % 16 + 1, device="cuda", dtype=torch.int32)
    indices = torch.randperm(batch * pages, device="cuda").int()
    plan.plan(starts, indices, last, HEADS, KV_HEADS, HEAD_DIM, 16, q_data_type=torch.bfloat16)
    return {"FlashInfer": lambda: [plan.run(query, cache) for cache in caches]}


def _flashinfer_prefill(length: int) -> dict[str, Callable[[], Any]]:
    try:
        import flashinfer
    except ImportError:
        return {}
    query, key, value = (
        torch.randn(length, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return {"FlashInfer": lambda: flashinfer.single_prefill_with_kv_cache(query, key, value, causal=True)}


def _adasplash(length: int) -> dict[str, Callable[[], Any]]:
    try:
        from adasplash import adasplash
    except ImportError:
        return {}
    # It knows no groups of heads: every query head has keys and values of its own.
    query, key, value = _heads(1, length, HEADS), _heads(1, length, HEADS), _heads(1, length, HEADS)
    query = query * SPREAD
    return {"AdaSplash": lambda: adasplash(query, key, value, alpha=1.5, is_causal=True)}
