"""The capacity of one server, and the number of servers that a load needs, computed by FORMULA."""

import glob
import math
from dataclasses import dataclass
from pathlib import Path

from sharp.core.manifest import Manifest, read_manifest
from sharp.serving.api.errors import InputError
from sharp.serving.backends.cache_size import bytes_per_block
from sharp.serving.capacity.speed import Speed

MEMORY_SHARE = 0.9  # of weights and cache; the rest is for activations and the runtime
UTILIZATION = 0.7  # of a server; at a higher one, requests with Poisson arrivals wait long
MOST_REQUESTS = 1e9  # a second
# The time of the engine itself in a greedy step of ENGINE_STREAMS streams (bench/results/engine_step.json).
ENGINE_SECONDS = 1.21e-3
ENGINE_STREAMS = 16
# Bytes per weight; for quantized models from the size of SmolLM2's whole files (bench/results/precision*.json).
WEIGHT_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.08, "int4": 0.95, "int4-128": 0.89}

FORMULA = """\
W weights' bytes, n weights, c cache bytes of a token, P prompt + A completion = context N, H attention's operations
batch     B = min(max sequences, (0.9 memory - W) / (c N))
step      s = max((W + B c (P + A/2)) / bandwidth, 2 n B / operations) + e max(1, B/16),  e = 1.21 ms of the engine
prompt    p = (2 n P + H P^2) / operations,  H = layers x query heads x (head dim + value dim)
server    r = 0.7 / (p + A s / B) requests a second
servers   rate / r, rounded up"""


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model folder that the plan needs.

    `weights` is the number of weights, estimated from the size of their files. Attention over a prompt of P tokens
    takes `attention_operations` x P^2 operations. `quantization` is None if the weights have the type `dtype`.
    """

    name: str
    weight_bytes: int
    weights: float
    cache_bytes_per_token: float
    attention_operations: int
    max_context: int
    dtype: str
    quantization: str | None


@dataclass(frozen=True)
class ExpectedLoad:
    """A load: `rate` requests a second, each of `context` tokens, of which `completion_tokens` are generated.

    `max_sequences` is the largest number of requests that a server runs together.
    """

    context: int
    completion_tokens: int
    rate: float
    max_sequences: int


@dataclass(frozen=True)
class CapacityPlan:
    """The capacity of one server, and the servers and the money that the load needs.

    Attributes:
        batch: requests that run together on a server.
        memory_bytes: memory that a server needs, in bytes.
        cache_bytes: the part of that memory for the key-value cache, in bytes.
        step_seconds: duration of a decode step of `batch` requests.
        first_token_seconds: duration of reading a prompt, without a queue.
        stream_tokens_per_second: generated tokens a second of a request that runs alone.
        batch_tokens_per_second: generated tokens a second of `batch` requests together.
        requests_per_second: requests a second that one server takes.
        servers: the number of servers that the load needs.
        price_per_hour: price of all these servers for an hour; None without a price.
        price_per_million_tokens: price of a million generated tokens; None without a price.
    """

    batch: int
    memory_bytes: float
    cache_bytes: float
    step_seconds: float
    first_token_seconds: float
    stream_tokens_per_second: float
    batch_tokens_per_second: float
    requests_per_second: float
    servers: int
    price_per_hour: float | None
    price_per_million_tokens: float | None


def read_model(folder: Path) -> ModelFacts:
    """Return the facts about the model of a folder.

    Raises:
        NotFoundError: there is no model folder.
        InputError: the folder cannot be used, or the server does not run models of this form.
    """
    manifest: Manifest = read_manifest(folder)
    if manifest.cache.form != "paged":
        raise InputError(f"{folder} was exported with --cache {manifest.cache.form}; sharp-serve runs --cache paged")
    # The graph and the files of its weights beside it, such as model.onnx.data.
    weight_bytes = sum(file.stat().st_size for file in folder.glob(f"{glob.escape(manifest.model_file)}*"))
    return ModelFacts(
        manifest.name,
        weight_bytes,
        weight_bytes / WEIGHT_BYTES[manifest.quantization or manifest.dtype],
        bytes_per_block(manifest) / manifest.cache.block_size,
        manifest.layers * manifest.q_heads * (manifest.head_dim + manifest.value_dim),
        manifest.max_context,
        manifest.dtype,
        manifest.quantization,
    )


def make_plan(
    model: ModelFacts, load: ExpectedLoad, memory_bytes: float, speed: Speed, price: float | None
) -> CapacityPlan:
    """Return how many servers `load` needs, and what each of them does.

    `memory_bytes` is the memory of one server. `price` is the price of one server for an hour; None leaves prices out.

    Raises:
        InputError: the context is longer than the model's, the completion is as long as the context or longer, one
            request does not fit, or rate or price is out of range.
    """
    if not 0 < load.rate <= MOST_REQUESTS:
        raise InputError(f"rate is {load.rate}; it must be above 0 and at most {MOST_REQUESTS:g} requests a second")
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"price is {price}; it must be a number at least 0")
    if load.context > model.max_context:
        raise InputError(f"context is {load.context}; {model.name} takes at most {model.max_context}")
    if load.completion_tokens >= load.context:
        raise InputError(f"completion_tokens is {load.completion_tokens}; it must be below the context, {load.context}")
    request_bytes = model.cache_bytes_per_token * load.context
    room = MEMORY_SHARE * memory_bytes - model.weight_bytes
    if room < request_bytes:
        raise InputError(
            f"{model.name} does not fit: weights of {model.weight_bytes / 1e9:.2f} GB and a request's cache of "
            f"{request_bytes / 1e9:.2f} GB need more than {MEMORY_SHARE:.0%} of {memory_bytes / 1e9:.1f} GB; "
            "give more memory, a shorter context or a quantized model"
        )
    batch = min(load.max_sequences, int(room // request_bytes))
    prompt, completion = load.context - load.completion_tokens, load.completion_tokens
    first = (2 * model.weights * prompt + model.attention_operations * prompt**2) / speed.operations_per_second
    step = _step(model, batch, prompt + completion / 2, speed)
    each = UTILIZATION / (first + completion * step / batch)
    servers = max(1, math.ceil(load.rate / each))
    hourly = None if price is None else servers * price
    return CapacityPlan(
        batch=batch,
        memory_bytes=(model.weight_bytes + batch * request_bytes) / MEMORY_SHARE,
        cache_bytes=batch * request_bytes,
        step_seconds=step,
        first_token_seconds=first,
        stream_tokens_per_second=1 / _step(model, 1, prompt + completion / 2, speed),
        batch_tokens_per_second=batch / step,
        requests_per_second=each,
        servers=servers,
        price_per_hour=hourly,
        price_per_million_tokens=None if hourly is None else hourly / (load.rate * completion * 3600) * 1e6,
    )


def _step(model: ModelFacts, batch: int, context: float, speed: Speed) -> float:
    """Return the seconds of a decode step of `batch` sequences of `context` tokens, the engine's own time included.

    The step reads the weights and every cache once.
    """
    read = (model.weight_bytes + batch * model.cache_bytes_per_token * context) / speed.bytes_per_second
    computed = 2 * model.weights * batch / speed.operations_per_second
    return max(read, computed) + ENGINE_SECONDS * max(1, batch / ENGINE_STREAMS)
