"""`run_model`: a model and its engine, without ports. All API frontends use it, here and in `sharp.ray`."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sharp.plugins.manifest import read_manifest
from sharp.serving.api_config import ApiConfig
from sharp.serving.config import EngineConfig, Settings
from sharp.serving.encoder.folder import load_encoder_folder
from sharp.serving.engine.loading import load_model_folder
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.engine.report import EngineReport
from sharp.serving.engine.thread import EngineThread, StepEngine
from sharp.serving.frontends.service import GenerationService
from sharp.serving.frontends.token_attention import TokenAttention
from sharp.serving.frontends.unknown_fields import UnknownFields
from sharp.serving.observability.metrics import Metrics, ModelMetrics
from sharp.serving.observability.tracing import otlp_tracing
from sharp.serving.tensors.folder import KINDS, load_tensor_folder
from sharp.serving.text.chat_forms import ChatForms, chat_forms
from sharp.serving.text.chat_template import ChatTemplate, load_chat_template
from sharp.serving.version import sharp_version

# After which a thread must hand over Python's lock. A GPU waits where the event loop holds it as a step ends.
SWITCH_SECONDS = 0.0002


@dataclass(frozen=True)
class ServerInfo:
    """How the server is set up: what GetServerInfo responds and the start prints.

    Attributes:
        version: of Sharp.
        models: the names of those served.
        backend: with its device, unless that is the CPU.
        kernels: attention runs in our kernels, not in standard ops.
        threads: of the backend.
        cache_tokens: that the KV cache holds.
        block_size: tokens of a cache block.
        max_batch_tokens: of a step.
        max_sequences: that run together.
        prefill_chunk_tokens: of prompts in a step, while others decode.
        prefix_cache: blocks of equal prefixes are shared.
        max_waiting_requests: beyond which requests are refused.
        max_waiting_tokens: of prompts that wait, beyond which requests are refused.
        speculative_tokens: draft tokens of a step; 0 is no speculation.
    """

    version: str
    models: tuple[str, ...]
    backend: str
    kernels: bool
    threads: int
    cache_tokens: int
    block_size: int
    max_batch_tokens: int
    max_sequences: int
    prefill_chunk_tokens: int
    prefix_cache: bool
    max_waiting_requests: int
    max_waiting_tokens: int
    speculative_tokens: int


@dataclass(frozen=True)
class RunningModel:
    """A model, its engine and the service in front of it.

    Attributes:
        model: the loaded folder.
        template: its chat template; None without one.
        engine: the thread of its engine.
        service: accepts requests.
        info: how the server is set up.
        metrics: of this model, among those of the server.
        api: what requests over HTTP may say.
        forms: how the model writes calls of tools and thoughts.
        attention: what its heads do with single tokens.
    """

    model: ModelFolder
    template: ChatTemplate | None
    engine: EngineThread
    service: GenerationService
    info: ServerInfo
    metrics: ModelMetrics
    api: ApiConfig
    forms: ChatForms
    attention: TokenAttention


@dataclass(frozen=True)
class LoadedModel:
    """A model with its engine, which is not running yet, and what is said of them at the start."""

    model: ModelFolder
    engine: StepEngine
    device: str
    kernels: bool
    batch_tokens: int
    prefill_chunk_tokens: int = 0
    speculative_tokens: int = 0


def load(path: Path, settings: Settings, config: EngineConfig) -> LoadedModel:
    """Load a decoder, an encoder, or a model of sets or of numbers.

    Raises:
        NotFoundError: there is no model folder.
        InputError: the folder cannot be used.
    """
    kind = read_manifest(path, check_files=False).kind
    if kind in KINDS:
        own, tensors, computing = load_tensor_folder(path, settings.backend, config)
        return LoadedModel(own, computing, tensors.device, tensors.kernels, computing.batch_tokens)
    if kind == "encoder":
        folder, encoder, encoding = load_encoder_folder(path, settings.backend, config, settings.encoder)
        return LoadedModel(folder, encoding, encoder.device, encoder.kernels, encoding.batch_tokens)
    model, backend, engine = load_model_folder(path, settings.backend, config)
    return LoadedModel(
        model,
        engine,
        backend.device,
        backend.kernels,
        config.max_batch_tokens,
        engine.prefill_chunk_tokens,
        engine.speculative_tokens,
    )


@asynccontextmanager
async def run_model(path: Path, settings: Settings, metrics: Metrics) -> AsyncIterator[RunningModel]:
    """Load the model folder at `path` and run its engine until the block exits; requests that still run then fail.

    Raises:
        NotFoundError: there is no model folder.
        InputError: the folder cannot be used.
    """
    config = settings.server
    endpoint = config.otlp_traces_endpoint
    tracing = None if endpoint is None else otlp_tracing(endpoint, sharp_version())
    template = await asyncio.to_thread(load_chat_template, path, settings.api.chat_template)
    forms = await asyncio.to_thread(chat_forms, template, settings.api)
    engine_config = settings.engine
    if settings.metrics.attention_metrics == "off":
        engine_config = replace(engine_config, attention_interval=0)
    # In a thread: the event loop must handle signals meanwhile.
    loaded = await asyncio.to_thread(load, path, settings, engine_config)
    model = loaded.model
    await asyncio.to_thread(model.guides.load)
    if settings.api.names:
        model = replace(model, manifest=model.manifest.model_copy(update={"name": settings.api.names[0]}))
    if not config.model_sampling:
        model = replace(model, sampling={})
    info = ServerInfo(
        version=sharp_version(),
        models=(model.manifest.name,),
        backend=f"{settings.backend.name} ({loaded.device})" if loaded.device != "cpu" else settings.backend.name,
        kernels=loaded.kernels,
        threads=settings.backend.threads,
        cache_tokens=model.cache_tokens,
        block_size=model.manifest.cache.block_size,
        max_batch_tokens=loaded.batch_tokens,
        max_sequences=settings.engine.max_sequences,
        prefill_chunk_tokens=loaded.prefill_chunk_tokens,
        prefix_cache=settings.engine.prefix_cache,
        max_waiting_requests=settings.engine.max_waiting_requests,
        max_waiting_tokens=settings.engine.max_waiting_tokens,
        speculative_tokens=loaded.speculative_tokens,
    )
    model_metrics = metrics.add_model(model.manifest, settings.metrics)

    def observe(report: EngineReport) -> None:
        model_metrics.observe(report)
        service.observe(report)

    thread = EngineThread(loaded.engine, observe)
    model_metrics.watch_step(lambda: thread.seconds_in_step)
    service = GenerationService(
        model,
        thread,
        config.max_unread_messages,
        config.stall_seconds,
        tracing,
        config.log_prompts,
        config.max_buffered_bytes,
    )
    service.names = settings.api.names or service.names
    attention = TokenAttention(path, model.manifest, loaded.device, settings.backend.threads, kernels=loaded.kernels)
    service.fields = UnknownFields(settings.api.unknown_fields)
    service.chat_template = None if template is None else template.source
    if loaded.device != "cpu":
        sys.setswitchinterval(SWITCH_SECONDS)
    thread.start()
    try:
        yield RunningModel(model, template, thread, service, info, model_metrics, settings.api, forms, attention)
    finally:
        # Not in the event loop: the last step may take a while, and delivers its events to this loop.
        await asyncio.to_thread(thread.stop)
        service.close()
        await asyncio.to_thread(attention.close)
        await asyncio.to_thread(model.guides.end)
        metrics.remove_model(model_metrics)
        if template is not None:
            template.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
