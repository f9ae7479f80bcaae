"""Loading of a model folder, with its backend and its engine."""

import logging
from pathlib import Path

from sharp.core.checksums import verify_files
from sharp.core.errors import InputError
from sharp.core.manifest import Manifest, check_model_version, check_verified, read_manifest
from sharp.plugins.op.temperature_range import short_of_context
from sharp.serving.backends import DecoderBackend, StepLimits, load_backend
from sharp.serving.backends.cache_size import cache_blocks
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.engine import Engine
from sharp.serving.engine.first_output import check_first_token
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def load_model_folder(
    path: Path, backend: BackendConfig, engine: EngineConfig
) -> tuple[ModelFolder, DecoderBackend, Engine]:
    """Load the model of a folder and create its engine.

    Raises:
        NotFoundError: there is no model folder at `path`.
        InputError: the folder cannot be used, a file is damaged, the model failed its verification or gives no token,
            or its cache does not fit the memory.
        SharpError: software that the backend needs is missing, or (`DeviceLostError`) the GPU is lost.
    """
    manifest = read_checked(path, backend)
    if manifest.kind != "decoder":
        raise InputError(f"{path} holds a {manifest.source.architecture}, which writes no text; serve a decoder")
    if manifest.cache.form != "paged":
        raise InputError(
            f"{path} was exported with --cache {manifest.cache.form}, but the server needs --cache paged; "
            "export the checkpoint again"
        )
    if (short := short_of_context(manifest)) is not None:
        logger.warning("%s", short)
    tokenizer = load_tokenizer(path, manifest)
    loaded = load_backend(path, manifest, backend)
    most = longest_context(manifest, engine)
    context = min(most, engine.cache_tokens or most)
    largest = StepLimits(engine.max_sequences, engine.max_batch_tokens, context, blocks=1)
    free, device, screened = loaded.free_memory(largest), loaded.device, loaded.screened
    blocks = cache_blocks(manifest, engine.cache_tokens, free, device, engine, screened=screened)
    longest = most
    if (limits := loaded.limits) is not None:
        blocks = _within_limits(limits, engine, blocks, manifest.cache.block_size)
        longest = min(longest, limits.context)
    sampling = manifest.sampling.model_dump(exclude_none=True)
    folder = ModelFolder(
        manifest,
        tokenizer,
        blocks,
        GuideCompiler(manifest, tokenizer, compact=engine.json_whitespace == "compact"),
        longest,
        sampling,
    )
    made = Engine(loaded, manifest, tokenizer, blocks, engine)
    check_first_token(loaded, manifest)
    return folder, loaded, made


def read_checked(path: Path, backend: BackendConfig) -> Manifest:
    """Return the manifest of a folder, after checking its version, its verification, and that its files are unchanged.

    Raises:
        NotFoundError: there is no model folder at `path`.
        InputError: the folder cannot be used, a file is damaged, the model failed its verification, or the settings
            name another version.
    """
    manifest = read_manifest(path)
    check_model_version(path, backend.model_version)
    check_verified(path, manifest, backend.allow_unverified)
    if backend.verify_files:
        verify_files(path, manifest)
    return manifest


def longest_context(manifest: Manifest, engine: EngineConfig) -> int:
    """Return the length of the longest sequence that the settings allow, in tokens.

    Raises:
        InputError: the settings allow more than the model takes.
    """
    if engine.max_context is not None and engine.max_context > manifest.max_context:
        raise InputError(f"max_context is {engine.max_context}; the model takes at most {manifest.max_context} tokens")
    return engine.max_context or manifest.max_context


def _within_limits(limits: StepLimits, engine: EngineConfig, blocks: int, block_size: int) -> int:
    """Return the number of cache blocks for a model that was compiled for limited sizes.

    Raises:
        InputError: the settings ask for more than the model was compiled for.
    """
    if engine.max_sequences > limits.sequences or engine.max_batch_tokens > limits.tokens:
        raise InputError(
            f"the engine takes at most {limits.sequences} sequences and {limits.tokens} tokens a step: serve it with "
            f"--max-sequences {limits.sequences} --max-batch-tokens {limits.tokens}, or build a larger one"
        )
    if engine.cache_tokens is not None and blocks > limits.blocks:
        raise InputError(
            f"cache_tokens is {engine.cache_tokens}, but the engine takes at most {limits.blocks * block_size}; "
            "build a larger one"
        )
    return min(blocks, limits.blocks)
