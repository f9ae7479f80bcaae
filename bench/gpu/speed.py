"""Times on a GPU: Sharp's kernels, their peers, and the machine's own limits. Medians of CUDA-event times."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.cases import Cases
from bench.gpu.compilation import Job, options_of
from bench.gpu.inputs import Call, make_call, run
from sharp.plugins.triton.options import Options

DECODE = ("softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid")
SCALED = {"softmax, int8 cache": torch.int8, "softmax, fp8 cache": torch.float8_e4m3fn}
# The factor by which the cache of a subject is smaller than in bfloat16.
OTHER_DECODE = {**dict.fromkeys(SCALED, 2), "softmax, contiguous keys": 1}
PREFILL = ("softmax", "ssa", "adaptive_softmax", "entmax")
QUESTIONS = PREFILL
QUESTION = (131_072, 32)  # tokens in the cache, and new tokens: a question about a long text
NEAR_KEYS = "entmax, ALiBi"  # as in the papers' models, where only nearby keys get a weight
CONTEXTS = (1024, 8192, 32_768, 131_072, 1_048_576)
PROMPTS = (2048, 8192, 32_768, 131_072)
BATCHES = (1, 8, 32)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SDPA_BACKENDS = {
    "torch SDPA (cuDNN)": SDPBackend.CUDNN_ATTENTION,
    "torch SDPA (flash)": SDPBackend.FLASH_ATTENTION,
}
SPREAD = 2.0  # standard deviation of the logits; the support that entmax finds in them is in the row
COLD_BYTES = 400 << 20  # of interleaved key-value caches, so that none stays in the second-level cache
MOST_BYTES = 16 << 30
SAMPLE_MILLISECONDS = 300.0


@dataclass(frozen=True)
class KernelTime:
    """Milliseconds: median and best of the repeats, and (third quartile - first) / median."""

    median: float
    best: float
    spread: float


def time_call(call: Callable[[], Any], graph: bool = True) -> KernelTime:
    """Return the times of a call in milliseconds, from 5 to 100 repeats after a warm-up.

    With `graph` the call is captured in a CUDA graph, in which there is no time between its launches.
    """
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
    return KernelTime(median, times[0], (times[len(times) * 3 // 4] - times[len(times) // 4]) / median)


def jobs(section: Literal["decode", "prefill", "statistics"]) -> list[Job]:
    """Return the kernels to compile before the measurement of a section."""

    def options(normalizer: str, **more: Any) -> Options:
        """Return the compile-time options of a call with this normalizer and head size."""
        return options_of(make_call(normalizer, ((1, 1),), head_dim=HEAD_DIM, device="cpu", **more))

    if section == "statistics":
        phases: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")
        states = (None, True)
        return [Job(options(name, statistics=on), phase) for phase in phases for name in PREFILL for on in states]
    if section == "prefill":
        near = options("entmax", alibi=True)
        return [Job(option, "prefill") for option in (*map(options, {*PREFILL, *QUESTIONS}), near)]
    scaled = [options("softmax", cache_dtype=dtype) for dtype in SCALED.values()]
    contiguous = replace(options("softmax"), contiguous=True)
    return [Job(option, "decode") for option in (*map(options, DECODE), *scaled, contiguous)]


def machine(cases: Cases) -> Iterator[dict[str, Any]]:
    """Yield the machine's limits: bytes copied (read and written) and bfloat16 matrix products, a second."""

    def copy() -> Iterator[dict[str, Any]]:
        """Yield the GPU's copy bandwidth in GB/s, reads and writes together."""
        source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        copied = time_call(lambda: target.copy_(source))
        yield {"gb_per_second": 2 * source.numel() / copied.median / 1e6}

    def multiply() -> Iterator[dict[str, Any]]:
        """Yield the speed of a large bfloat16 matrix product in TFLOP/s."""
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        product = time_call(lambda: a @ b)
        yield {"tflops": 2 * 8192**3 / product.median / 1e9}

    yield from cases.run({"what": "copy"}, copy)
    yield from cases.run({"what": "matrix product"}, multiply)


def decode(quick: bool, cases: Cases) -> Iterator[dict[str, Any]]:
    """Yield times of one token for every sequence: microseconds a layer, and bytes of keys and values a second."""
    for context in CONTEXTS[:3] if quick else CONTEXTS:
        for batch in BATCHES:
            if cache_bytes(batch, context) > MOST_BYTES:
                continue
            calls = cache(partial(_decode_calls, batch, context))  # made only when the first subject is timed
            for name in (*DECODE, *OTHER_DECODE, "torch SDPA", "FlashInfer"):
                # The caches of these subjects are generated in float32.
                if name in OTHER_DECODE and cache_bytes(batch, context) > MOST_BYTES // 4:
                    continue
                named = {"subject": name, "batch": batch, "context": context}
                yield from cases.run(named, partial(_time_decode, name, calls, batch, context))


def cache_bytes(batch: int, context: int) -> int:
    """Return the bytes of keys and values in bfloat16 of `batch` sequences with `context` tokens each."""
    return batch * context * KV_HEADS * HEAD_DIM * 2 * 2


def _decode_calls(batch: int, context: int) -> list[Call]:
    """Return decode calls with random inputs, as many layers as exceed the GPU's cache, so that reads are cold."""
    layers = max(1, min(64, COLD_BYTES // cache_bytes(batch, context)))
    return [make_call("softmax", ((context - 1, 1),) * batch, spread=SPREAD, seed=i) for i in range(layers)]


def _scaled_calls(dtype: torch.dtype, batch: int, context: int, layers: int) -> list[Call]:
    """Return `layers` decode calls of `batch` sequences of `context` tokens, with caches of `dtype` and scales."""
    options: dict[str, Any] = {"spread": SPREAD, "cache_dtype": dtype}
    return [make_call("softmax", ((context - 1, 1),) * batch, seed=i, **options) for i in range(layers)]


def _contiguous_decode(batch: int, context: int, layers: int) -> Callable[[], Any]:
    """Return a step, a call per layer, of op Attention with a shared buffer whose last slot the new key takes."""
    from sharp.plugins.triton.attention import attention

    query, fresh = _heads(batch, 1, HEADS), _heads(batch, 1, KV_HEADS)
    caches = [(_heads(batch, context, KV_HEADS), _heads(batch, context, KV_HEADS)) for _ in range(layers)]
    past = torch.full((batch,), context - 1, device="cuda", dtype=torch.int32)
    off = torch.tensor(False, device="cuda")

    def step() -> None:
        """Run one decode step, a call per layer."""
        for key, value in caches:
            attention(
                *(query, fresh, fresh, key, value, past),
                collect_stats=off,
                normalizer="softmax",
                scale=SPREAD * HEAD_DIM**-0.5,
            )

    return step


def _time_decode(name: str, calls: Callable[[], list[Call]], batch: int, context: int) -> Iterator[dict[str, Any]]:
    """Yield one row: the time of a decode step of subject `name`; no row if its library is not installed.

    `calls` makes the op's calls, one per layer.
    """
    layers = len(calls())
    if name == "torch SDPA":
        subject = _sdpa_decode(batch, context, layers)
    elif name == "FlashInfer":
        if find_spec("flashinfer") is None:
            return
        subject = _flashinfer_decode(batch, context, layers)
    elif name in SCALED:
        subject = _over(_scaled_calls(SCALED[name], batch, context, layers))
    elif name == "softmax, contiguous keys":
        subject = _contiguous_decode(batch, context, layers)
    else:
        subject = _over([call.with_normalizer(name) for call in calls()])
    timing = time_call(subject, graph=name != "FlashInfer")
    milliseconds = timing.median / layers
    yield {
        "microseconds_per_layer": milliseconds * 1e3,
        "cache_gb_per_second": cache_bytes(batch, context) / OTHER_DECODE.get(name, 1) / milliseconds / 1e6,
        "spread": timing.spread,
        **({"support": support(calls()[0].with_normalizer(name))} if name == "entmax" else {}),
    }


def prefill(quick: bool, cases: Cases) -> Iterator[dict[str, Any]]:
    """Yield times of one prompt and operations a second of its causal half, then times of few tokens behind many."""
    for length in PROMPTS[:2] if quick else PROMPTS:
        for name in (*PREFILL, NEAR_KEYS, *SDPA_BACKENDS, "FlashInfer", "AdaSplash"):
            yield from cases.run({"subject": name, "length": length}, partial(_time_prefill, name, length))
    context, tokens = QUESTION
    for name in QUESTIONS:
        named = {"subject": name, "length": tokens, "context": context}
        yield from cases.run(named, partial(_time_question, name))


def _time_question(name: str) -> Iterator[dict[str, Any]]:
    """Yield one row: milliseconds of a question behind a long context that is cached, for normalizer `name`."""
    timing = time_call(_over([make_call(name, (QUESTION,), spread=SPREAD)]))
    yield {
        "milliseconds": timing.median,
        "cache_gb_per_second": cache_bytes(1, sum(QUESTION)) / timing.median / 1e6,
        "spread": timing.spread,
    }


def _time_prefill(name: str, length: int) -> Iterator[dict[str, Any]]:
    """Yield one row: milliseconds of a prompt of `length` tokens for subject `name`; no row if it is not installed."""
    normalizer = "entmax" if name == NEAR_KEYS else name
    call = make_call("softmax", ((0, length),), spread=SPREAD, alibi=name == NEAR_KEYS).with_normalizer(normalizer)
    if name in SDPA_BACKENDS:
        subject = sdpa_prefill(length, SDPA_BACKENDS[name])
    elif name in (*PREFILL, NEAR_KEYS):
        subject = _over([call])
    else:
        if find_spec(name.lower()) is None:
            return
        subject = _flashinfer_prefill(length) if name == "FlashInfer" else adasplash_prefill(length)
    timing = time_call(subject, graph=name not in ("FlashInfer", "AdaSplash"))
    yield {
        "milliseconds": timing.median,
        "tflops": 2 * length * (length + 1) * HEADS * HEAD_DIM / timing.median / 1e9,
        "spread": timing.spread,
        **({"support": support(call)} if normalizer == "entmax" else {}),
    }


def statistics_cost(cases: Cases) -> Iterator[dict[str, Any]]:
    """Yield the times of a call without the input collect_stats, with it false, and with it true."""
    for phase, sequences in {"decode": ((8191, 1),) * 32, "prefill": ((0, 8192),)}.items():
        for normalizer in PREFILL:
            yield from cases.run(
                {"phase": phase, "normalizer": normalizer}, partial(_time_statistics, normalizer, sequences)
            )


def _time_statistics(normalizer: str, sequences: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
    """Yield one row: milliseconds without statistics, and the ratios to it with statistics off and on."""
    times = {}
    for state in (None, False, True):
        call = make_call(normalizer, sequences, spread=SPREAD, statistics=state)
        times[state] = time_call(_over([call])).median
    yield {
        "absent_milliseconds": times[None],
        "off_ratio": times[False] / times[None],
        "on_ratio": times[True] / times[None],
    }


def support(call: Call) -> float:
    """Return the mean share of the visible keys that have a weight, over all rows and heads; the call runs once."""
    device = call.tensors["query"].device
    stats = run(call.with_tensors(collect_stats=torch.tensor(True, device=device)))[-1]
    starts, contexts = call.tensors["query_start"].tolist(), call.tensors["context_lens"].tolist()
    visible = torch.cat(
        [
            torch.arange(context + 1, context + 1 + end - first, device=device)
            for context, first, end in zip(contexts, starts[:-1], starts[1:], strict=True)
        ]
    )
    return float((stats[:, :, 1] / visible[:, None]).mean())


def _milliseconds(call: Callable[[], Any]) -> float:
    """Return the GPU time of one call in milliseconds."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


def _over(calls: list[Call]) -> Callable[[], None]:
    """Return a function that runs all calls, one after the other."""

    def step() -> None:
        """Run all calls once."""
        for call in calls:
            run(call)

    return step


def _heads(sequences: int, tokens: int, heads: int) -> Tensor:
    """Return random bfloat16 heads [sequences, heads, tokens, HEAD_DIM] on the GPU."""
    return torch.randn(sequences, heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)


def _sdpa_decode(batch: int, context: int, layers: int) -> Callable[[], Any]:
    """Return a function that runs a decode step of torch's SDPA: `batch` sequences of `context` tokens per layer."""
    query = _heads(batch, 1, HEADS)
    caches = [(_heads(batch, context, KV_HEADS), _heads(batch, context, KV_HEADS)) for _ in range(layers)]

    def step() -> None:
        """Run one decode step, a call per layer."""
        for key, value in caches:
            functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return step


def sdpa_prefill(length: int, backend: SDPBackend) -> Callable[[], Any]:
    """Return a function that computes causal attention of a random prompt of `length` tokens by a backend of torch."""
    query, key, value = _heads(1, length, HEADS), _heads(1, length, KV_HEADS), _heads(1, length, KV_HEADS)

    def step(grouped: bool = True) -> None:
        with sdpa_kernel(backend):
            functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    try:
        step()
    except RuntimeError:  # this backend has no groups of heads, so every query head gets its own keys and values
        key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
        step = partial(step, False)
    return step


def _flashinfer_decode(batch: int, context: int, layers: int) -> Callable[[], Any]:
    """Return a function that runs `layers` decode calls of FlashInfer, with pages of 16 tokens."""
    import flashinfer

    query = torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    pages = -(-context // 16)
    shape = (batch * pages, 2, 16, KV_HEADS, HEAD_DIM)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
    plan = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * pages
    last = torch.full((batch,), (context - 1) % 16 + 1, device="cuda", dtype=torch.int32)
    indices = torch.randperm(batch * pages, device="cuda").int()
    plan.plan(starts, indices, last, HEADS, KV_HEADS, HEAD_DIM, 16, q_data_type=torch.bfloat16)
    return lambda: [plan.run(query, cache) for cache in caches]


def _flashinfer_prefill(length: int) -> Callable[[], Any]:
    """Return a function that runs a causal prompt by FlashInfer."""
    import flashinfer

    query, key, value = (
        torch.randn(length, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return lambda: flashinfer.single_prefill_with_kv_cache(query, key, value, causal=True)


def adasplash_prefill(length: int) -> Callable[[], Any]:
    """Return a function that computes causal entmax 1.5 of a random prompt of `length` tokens by AdaSplash."""
    from adasplash import adasplash

    # AdaSplash has no groups of heads, so every query head has keys and values of its own.
    query, key, value = _heads(1, length, HEADS), _heads(1, length, HEADS), _heads(1, length, HEADS)
    query = query * SPREAD
    return lambda: adasplash(query, key, value, alpha=1.5, is_causal=True)
