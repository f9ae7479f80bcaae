"""The block that a server prints when it starts: all decisions about the model, the engine and the addresses."""

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape

from sharp.core.manifest import Port
from sharp.core.table import Table
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.backends.cache_size import bytes_per_block
from sharp.serving.config import MIB, ServerConfig
from sharp.serving.server.server import Started


def print_startup(started: Started) -> None:
    """Print one block: the model, its norm, the cache, the threads and the addresses."""
    manifest, info, settings = started.model.manifest, started.info, started.settings
    norm = manifest.norm
    engine, metrics = settings.engine, settings.metrics
    interval = engine.attention_interval
    scheme = "http" if settings.server.tls is None else "https"
    every = f"every {interval} steps" if interval > 1 else "every step" if interval else "never"
    attention = (
        f"statistics {every}, series per {metrics.attention_metrics}, of at most {metrics.attention_series_limit} heads"
    )
    precision = manifest.dtype if manifest.quantization is None else f"{manifest.quantization} weights"
    rows = {
        "model": f"{manifest.name} ({manifest.layers} layers, {manifest.q_heads} heads, {precision})",
        "norm": norm.name + ("" if norm.trained else " (the checkpoint was not trained with it)"),
        **_size_rows(started),
        "queue": f"at most {engine.max_waiting_requests} sequences and {engine.max_waiting_tokens} prompt tokens",
        "backend": f"{info.backend}, {info.threads} threads, attention by "
        + ("our kernels" if info.kernels else "standard ops (slow)")
        + (
            ", decode steps as CUDA graphs"
            if settings.backend.cuda_graphs and info.kernels and info.backend == "onnxruntime (cuda)"
            else ""
        ),
        "attention": "no statistics" if metrics.attention_metrics == "off" else attention,
        "log": f"a line of {settings.server.log_format} for every request, "
        + ("with" if settings.server.log_prompts else "without")
        + " its prompt; traces "
        + (f"to {settings.server.otlp_traces_endpoint}" if settings.server.otlp_traces_endpoint else "off"),
        "security": _security(settings.server),
        "gRPC": started.grpc_address,
        "OpenAI": f"{scheme}://{started.http_address}/v1" + _endpoints(started),
        "KServe": f"{scheme}://{started.http_address}/v2/models/{manifest.name}",
        "metrics": f"{scheme}://{started.http_address}/metrics",
        "page": f"{scheme}://{started.http_address}/",
    }
    table = Table(title=f"Sharp {info.version}", title_justify="left", show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    # A pipe has no width, so the lines stay whole.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _endpoints(started: Started) -> str:
    """Return a note in brackets on the part of OpenAI's API that the model has; empty if it has all of it."""
    abilities = started.model.abilities
    if abilities.encoder is not None:
        return " (embeddings, rerank, score)" if abilities.encoder.embedding else " (rerank, score)"
    if abilities.generator is None:
        return " (models only)"
    return "" if started.chat else " (no chat template: completions only)"


def _size_rows(started: Started) -> dict[str, str]:
    """Return the lines of the startup block on context and batch, and for this kind of model others, by title."""
    model, info, abilities = started.model, started.info, started.model.abilities
    if (tensors := abilities.tensors) is not None:
        name = tensors.length_name
        return {
            "inputs": ", ".join(f"{port.name} {shape_of(port)}" for port in tensors.inputs),
            "output": f"{tensors.output.name} {shape_of(tensors.output)}",
            "context": f"{model.context_limit} as the {name} of a row, {model.request_limit} of a request",
            "batch": f"{info.max_batch_tokens} {name} a step, {info.max_sequences} rows together",
        }
    batch = f"{info.max_batch_tokens} tokens a step, {info.max_sequences} sequences together"
    if abilities.encoder is not None:
        rows = {"context": f"{model.context_limit} tokens of a text", "batch": batch}
        if (embedding := abilities.encoder.embedding) is not None:
            how = f"{embedding.pooling} pooling, {'normalized' if embedding.normalize else 'not normalized'}"
            rows["embeddings"] = f"{embedding.size} dimensions, {how}"
        return rows
    return _decoder_rows(started, abilities.require_generator().sampling, batch)


def _decoder_rows(started: Started, recommended: Mapping[str, float], batch: str) -> dict[str, str]:
    """Return the lines about context, cache, batch and sampling that a decoder's server prints, by title.

    `recommended` are the model's sampling parameters by name, and `batch` is the line of that title.
    """
    manifest, info = started.model.manifest, started.info
    limit = started.model.context_limit
    model_limit = f" (the model takes {manifest.max_context})" if limit < manifest.max_context else ""
    cache_bytes = info.cache_tokens // info.block_size * bytes_per_block(manifest, screened=info.kernels)
    sampling = {"temperature": SamplingParams().temperature, **recommended}
    source = f" ({manifest.sampling_source})" if recommended and manifest.sampling_source else ""
    return {
        "context": f"{limit} tokens{model_limit}, trained on {manifest.trained_context}",
        "cache": f"{info.cache_tokens} tokens in blocks of {info.block_size}, {manifest.cache.dtype}, "
        f"{cache_bytes / MIB:.0f} MiB",
        "batch": batch,
        "sampling": ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        + f"{source} unless a request says otherwise",
        "prompts": f"at most {info.prefill_chunk_tokens} tokens a step while others decode, prefix cache "
        + ("on" if info.prefix_cache else "off"),
        "drafts": f"up to {info.speculative_tokens} tokens a step (prompt lookup)"
        if info.speculative_tokens
        else "none",
    }


def shape_of(port: Port) -> str:
    """Return the shape of a tensor, with names for the dimensions that vary."""
    return escape(f"[{', '.join(map(str, port.shape))}]")


def _security(server: ServerConfig) -> str:
    """Return the words for TLS and authentication."""
    tls = (
        "plain text"
        if server.tls is None
        else "TLS"
        if server.tls.client_ca is None
        else "TLS with client certificates"
    )
    file = "the key that was given" if server.api_key is not None else server.token_file
    tokens = "authentication: none" if file is None else f"bearer tokens of {file}"
    return f"{tls}, {tokens}"
