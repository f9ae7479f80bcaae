"""What `sharp-serve` can be told, from flags, the environment and a file; flags count first, then the environment.

Every setting has one name: `grpc_port` in a TOML file, `SHARP_GRPC_PORT` in the environment, `--grpc-port` as a flag.
"""

import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from sharp.serving.api.errors import InputError
from sharp.serving.backends import BACKENDS
from sharp.serving.config import (
    ATTENTION_LEVELS,
    DEVICES,
    LOG_FORMATS,
    BackendConfig,
    EngineConfig,
    MetricsConfig,
    ServerConfig,
    Settings,
)
from sharp.serving.machine import available_cpus
from sharp.serving.server.tls import TlsConfig

logger = logging.getLogger(__name__)

PREFIX = "SHARP_"
CONFIG_VARIABLE = "SHARP_CONFIG"


class ServeSettings(BaseSettings):
    """The settings of `sharp-serve`; descriptions are its help. What a value may be is checked by the dataclasses."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address that both ports are bound to.")
    grpc_port: int = Field(50051, description="Port of gRPC; 0 picks a free one.")
    http_port: int = Field(8000, description="Port of OpenAI's API and /metrics; 0 picks a free one.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain; both ports then take TLS only.")
    tls_key: Path | None = Field(None, description="PEM key of the certificate.")
    tls_client_ca: Path | None = Field(None, description="PEM certificates; a client must show one of theirs (mTLS).")
    token_file: Path | None = Field(
        None,
        description="File of bearer tokens, one a line; who has none gets health, metrics, version and the page only.",
    )
    grace_seconds: float = Field(
        5.0,
        ge=0,
        description="How long running requests may go on after SIGTERM. 3 s later the process ends whatever runs, "
        "with exit code 124.",
    )
    stall_seconds: float = Field(120.0, gt=0, description="A step that takes longer makes health say 'not serving'.")
    log_format: str = Field("text", description=f"Lines of the log; one of: {', '.join(LOG_FORMATS)}.")
    log_prompts: bool = Field(False, description="Write the prompts of requests into the log.")
    otlp_traces_endpoint: str | None = Field(
        None, description="Send OpenTelemetry traces to this address, as http://127.0.0.1:4317.  [default: none]"
    )
    model_sampling: bool = Field(
        True,
        description="Requests that leave out temperature, top-k, top-p, min-p or repetition penalty get those of the "
        "checkpoint's generation_config.json.",
    )
    backend: str = Field("onnxruntime", description=f"One of: {', '.join(BACKENDS)}.")
    device: str = Field(
        "auto",
        description="Where onnxruntime runs; auto is a GPU where one, its provider and our library are there; "
        f"one of: {', '.join(DEVICES)}.",
    )
    threads: int = Field(
        default_factory=available_cpus,
        description="Threads of the backend.  [default: one per processor that it may use]",
    )
    kernels: bool = Field(True, description="Run attention in our kernels, or as standard ops: slow, for comparison.")
    cuda_graphs: bool = Field(False, description="On a GPU, replay decode steps as CUDA graphs.")
    allow_unverified: bool = Field(False, description="Serve a model that failed its verification, too.")
    cache_tokens: int | None = Field(
        None,
        description="Tokens that the key-value cache holds.  [default: the longest context, at least 32768, at most "
        "half of the free memory]",
    )
    max_batch_tokens: int = Field(2048, description="Most tokens that one step computes.")
    max_sequences: int = Field(64, description="Most answers that run together.")
    prefill_chunk_tokens: int | None = Field(
        None,
        description="Most tokens of prompts that a step computes while other requests decode.  [default: 64 on a CPU, "
        "512 on a GPU]",
    )
    speculative_tokens: int | None = Field(
        None,
        description="Most draft tokens of a step (speculative decoding by prompt lookup); the model checks them, so "
        "answers stay the same up to rounding.  [default: 8 on a CPU, 0 on a GPU or with an int8 cache]",
    )
    prefix_cache: bool = Field(True, description="Keep computed blocks for prompts that start with the same tokens.")
    max_waiting_requests: int = Field(1024, description="Most answers that wait; more are refused.")
    max_waiting_tokens: int = Field(2**20, description="Most prompt tokens of requests that wait.")
    attention_interval: int = Field(
        8, description="Collect attention statistics on every n-th step; 1 is every step, 0 never."
    )
    attention_metrics: str = Field(
        "head", description=f"Attention metrics per head or per layer; one of: {', '.join(ATTENTION_LEVELS)}."
    )
    attention_series_limit: int = Field(
        2048, description="Most heads with metrics of their own; past it they are per layer."
    )
    dispersion_threshold: float = Field(
        0.9, description="A head is dispersed from this normalized entropy on, of at most 1 ..."
    )
    dispersion_tokens: int = Field(1024, description="... once it has been there for so many collected tokens.")
    attention_baseline: Path | None = Field(
        None, description="File of sharp baseline; metrics say how far entropies are from it."
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS needs both tls_cert and tls_key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key too")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the file that `read_settings` names."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


# SHARP_TOKEN is for clients, SHARP_LIBRARY_FOLDER and SHARP_ISA are for the kernel library.
KNOWN_VARIABLES = {
    *(CONFIG_VARIABLE, "SHARP_TOKEN", "SHARP_LIBRARY_FOLDER", "SHARP_ISA"),
    *(PREFIX + name.upper() for name in ServeSettings.model_fields),
}


def read_settings(flags: Mapping[str, Any], config: Path | None) -> Settings:
    """The settings of a server from the flags that were given, the environment and the file `config`.

    Raises:
        InputError: the file cannot be read, a name is not known, or a value cannot be used; the message says where.
    """
    if config is not None and not config.is_file():
        raise InputError(f"the configuration {config} does not exist")

    for name in os.environ:
        if name.startswith(PREFIX) and name not in KNOWN_VARIABLES:
            logger.warning("%s is no setting of sharp-serve; sharp-serve --help lists them", name)

    class Configured(ServeSettings):
        model_config = SettingsConfigDict(toml_file=config)

    try:
        found = Configured(**flags)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{config} is not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "there is no such setting; sharp-serve --help lists them"
        raise InputError(f"{name}: {message}" if name else message) from error
    return _settings(found)


def _settings(found: ServeSettings) -> Settings:
    tls = None
    if found.tls_cert is not None and found.tls_key is not None:
        tls = TlsConfig(found.tls_cert, found.tls_key, found.tls_client_ca)
    return Settings(
        ServerConfig(
            found.host,
            found.grpc_port,
            found.http_port,
            grace_seconds=found.grace_seconds,
            stall_seconds=found.stall_seconds,
            tls=tls,
            token_file=found.token_file,
            log_format=found.log_format,
            log_prompts=found.log_prompts,
            otlp_traces_endpoint=found.otlp_traces_endpoint,
            model_sampling=found.model_sampling,
        ),
        EngineConfig(
            found.cache_tokens,
            found.max_batch_tokens,
            found.max_sequences,
            found.attention_interval,
            found.max_waiting_requests,
            found.max_waiting_tokens,
            prefix_cache=found.prefix_cache,
            prefill_chunk_tokens=found.prefill_chunk_tokens,
            speculative_tokens=found.speculative_tokens,
        ),
        MetricsConfig(
            found.attention_metrics,
            found.attention_series_limit,
            dispersion_threshold=found.dispersion_threshold,
            dispersion_tokens=found.dispersion_tokens,
            attention_baseline=found.attention_baseline,
        ),
        BackendConfig(
            found.backend,
            found.threads,
            kernels=found.kernels,
            allow_unverified=found.allow_unverified,
            device=found.device,
            cuda_graphs=found.cuda_graphs,
        ),
    )
