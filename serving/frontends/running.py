"""`run_model`: a model and its engine, without ports. All API frontends use it, here and in `sharp.ray`."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sharp.core.manifest import Manifest, model_version, read_manifest
from sharp.serving.api_config import ApiConfig
from sharp.serving.config import EngineConfig, Settings
from sharp.serving.encoder.folder import load_encoder_folder
from sharp.serving.engine.loading import load_model_folder
from sharp.serving.engine.mapped_files import watch_mapped_files
from sharp.serving.engine.report import EngineReport
from sharp.serving.engine.served_model import ServedModel
from sharp.serving.engine.thread import EngineThread, StepEngine
from sharp.serving.frontends.service import GenerationService
from sharp.serving.frontends.token_attention import TokenAttention
from sharp.serving.frontends.unknown_fields import UnknownFields
from sharp.serving.observability.metrics import Metrics, ModelMetrics
from sharp.serving.observability.tracing import otlp_tracing
from sharp.serving.tensors.folder import KINDS, load_tensor_folder
from sharp.serving.text.chat_forms import ChatForms, chat_forms
from sharp.serving.text.chat_template import ChatTemplate, NoChatTemplate, usable_chat_template
from sharp.serving.version import sharp_version

# Seconds after which a thread must release the interpreter's lock. At the end of a step a GPU waits while the event
# loop holds the lock.
SWITCH_SECONDS = 0.0002


@dataclass(frozen=True)
class ServerInfo:
    """The configuration of a running server, which GetServerInfo returns and the server prints at its start.

    Attributes:
        version: the version of Sharp.
        models: the names of the served models.
        backend: the name of the backend, with its device unless that is the CPU.
        kernels: whether attention runs in Sharp's kernels, not in standard ops.
        threads: the number of threads of the backend.
        cache_tokens: the number of tokens that the KV cache holds.
        block_size: the number of tokens of a cache block.
        max_batch_tokens: the largest number of tokens of a step.
        max_sequences: the largest number of sequences that run together.
        prefill_chunk_tokens: the largest number of prompt tokens of a step while other sequences decode.
        prefix_cache: whether sequences share the cache blocks of equal prefixes.
        max_waiting_requests: the number of waiting requests beyond which new ones are refused.
        max_waiting_tokens: the number of prompt tokens of waiting requests beyond which new ones are refused.
        speculative_tokens: the number of draft tokens of a step; 0 is no speculation.
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
        template: the model's chat template, or the reason why there is none.
        engine: the thread of the model's engine.
        service: accepts requests for the model.
        info: the configuration of the server.
        metrics: the metrics of this model, among those of the server.
        api: the settings of requests over HTTP.
        forms: the forms in which the model writes tool calls and reasoning.
        attention: computes the attention weights of the model's heads on single tokens.
    """

    model: ServedModel
    template: ChatTemplate | NoChatTemplate
    engine: EngineThread
    service: GenerationService
    info: ServerInfo
    metrics: ModelMetrics
    api: ApiConfig
    forms: ChatForms
    attention: TokenAttention


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its engine, which is not running yet, and facts for `ServerInfo`.

    Sizes are in tokens; they are 0 where this kind of model has no such size. `kernels` says whether attention runs
    Sharp's kernels.
    """

    model: ServedModel
    engine: StepEngine
    device: str
    kernels: bool
    batch_tokens: int
    cache_tokens: int = 0
    prefill_chunk_tokens: int = 0
    speculative_tokens: int = 0


def load(path: Path, settings: Settings, config: EngineConfig) -> LoadedModel:
    """Load a decoder, an encoder, or a model of sets or of numbers, and give it the name that the settings choose.

    Raises:
        NotFoundError: there is no model folder.
        InputError: the folder cannot be used.
        SharpError: software that the backend needs is missing, or (`DeviceLostError`) the GPU is lost.
    """
    kind = read_manifest(path, check_files=False).kind

    def named(manifest: Manifest) -> Manifest:
        """Return the manifest with the name that the settings give the model, if they do."""
        return manifest.model_copy(update={"name": settings.api.names[0]}) if settings.api.names else manifest

    if kind in KINDS:
        function, rows, computing = load_tensor_folder(path, settings.backend, config)
        function = replace(function, manifest=named(function.manifest))
        return LoadedModel(function, computing, rows.device, rows.kernels, computing.batch_tokens)
    if kind == "encoder":
        encoder, rows, encoding = load_encoder_folder(path, settings.backend, config, settings.encoder)
        encoder = replace(encoder, manifest=named(encoder.manifest))
        return LoadedModel(encoder, encoding, rows.device, rows.kernels, encoding.batch_tokens)
    model, backend, engine = load_model_folder(path, settings.backend, config)
    sampling = model.sampling if settings.server.model_sampling else {}
    return LoadedModel(
        replace(model, manifest=named(model.manifest), sampling=sampling),
        engine,
        backend.device,
        backend.kernels,
        config.max_batch_tokens,
        model.cache_tokens,
        engine.prefill_chunk_tokens,
        engine.speculative_tokens,
    )


def _info(loaded: LoadedModel, settings: Settings) -> ServerInfo:
    """Return the facts about a running server that clients can query."""
    backend, engine = settings.backend, settings.engine
    return ServerInfo(
        version=sharp_version(),
        models=(loaded.model.manifest.name,),
        backend=f"{backend.name} ({loaded.device})" if loaded.device != "cpu" else backend.name,
        kernels=loaded.kernels,
        threads=backend.threads,
        cache_tokens=loaded.cache_tokens,
        block_size=loaded.model.manifest.cache.block_size,
        max_batch_tokens=loaded.batch_tokens,
        max_sequences=engine.max_sequences,
        prefill_chunk_tokens=loaded.prefill_chunk_tokens,
        prefix_cache=engine.prefix_cache,
        max_waiting_requests=engine.max_waiting_requests,
        max_waiting_tokens=engine.max_waiting_tokens,
        speculative_tokens=loaded.speculative_tokens,
    )


@asynccontextmanager
async def run_model(path: Path, settings: Settings, metrics: Metrics) -> AsyncIterator[RunningModel]:
    """Load the model folder at `path` and run its engine until the block exits; requests that still run then fail.

    Raises:
        NotFoundError: there is no model folder.
        InputError: the folder or a setting cannot be used.
        SharpError: software that the backend needs is missing, or (`DeviceLostError`) the GPU is lost.
    """
    config = settings.server
    endpoint = config.otlp_traces_endpoint
    tracing = None if endpoint is None else otlp_tracing(endpoint, sharp_version())
    template = await asyncio.to_thread(
        usable_chat_template, path, settings.api.chat_template, settings.api.on_dropped_content
    )
    forms = await asyncio.to_thread(chat_forms, template, settings.api)
    engine_config = settings.engine
    if settings.metrics.attention_metrics == "off":
        engine_config = replace(engine_config, attention_interval=0)
    # In a thread, because the event loop must handle signals meanwhile.
    mapped = await asyncio.to_thread(watch_mapped_files, path, settings.backend.weights)
    # Decide this once, because the available memory changes while the model is loaded.
    weights = "copy" if mapped is None else "map"
    settings = replace(settings, backend=replace(settings.backend, weights=weights))
    loaded = await asyncio.to_thread(load, path, settings, engine_config)
    model = loaded.model
    generator = model.abilities.generator
    if generator is not None:
        await asyncio.to_thread(generator.guides.load)
    model_metrics = metrics.add_model(model.manifest, settings.metrics, model_version(path))

    def observe(report: EngineReport) -> None:
        """Pass the engine's report to the metrics and the service."""
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
    service.isolate_tokens = config.prefix_isolation == "token"
    service.mapped = mapped if loaded.device == "cpu" else None
    service.names = settings.api.names or service.names
    attention = TokenAttention(path, model.manifest, loaded.device, settings.backend, kernels=loaded.kernels)
    service.fields = UnknownFields(settings.api.unknown_fields)
    service.chat_template = template.source if isinstance(template, ChatTemplate) else None
    if loaded.device != "cpu":
        sys.setswitchinterval(SWITCH_SECONDS)
    thread.start()
    try:
        yield RunningModel(
            model, template, thread, service, _info(loaded, settings), model_metrics, settings.api, forms, attention
        )
    finally:
        # Stop in a thread, because the last step may take a while and delivers its events to this event loop.
        await asyncio.to_thread(thread.stop)
        service.close()
        await asyncio.to_thread(attention.close)
        if generator is not None:
            await asyncio.to_thread(generator.guides.end)
        metrics.remove_model(model_metrics)
        template.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
