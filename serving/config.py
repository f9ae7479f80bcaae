"""The settings of every part: one frozen dataclass per component, read once and printed at start."""

from dataclasses import dataclass, field
from pathlib import Path

from sharp.serving.api.errors import InputError
from sharp.serving.machine import available_cpus
from sharp.serving.server.tls import TlsConfig

MIB = 2**20
MOST = 2**31 - 1  # tokens of a step, and of all that waits: more is no limit
MOST_THREADS = 1024  # starting them takes the longer the more there are: 100,000 took minutes that nothing could end
LOG_FORMATS = ("text", "json")
ATTENTION_LEVELS = ("off", "layer", "head")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class BackendConfig:
    """How the model is run.

    Attributes:
        name: one of `sharp.serving.backends.BACKENDS`.
        device: of ONNX Runtime; "auto" is the GPU where driver, provider and kernel library are there, else the CPU.
        threads: threads of the runtime.
        kernels: use the kernel library; False runs attention as standard ops, for comparison.
        allow_unverified: run a model that failed its verification, too.
        cuda_graphs: replay decode steps as CUDA graphs; for device "cuda" and our kernels only.
    """

    name: str = "onnxruntime"
    threads: int = field(default_factory=available_cpus)
    kernels: bool = True
    allow_unverified: bool = False
    device: str = "auto"
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        _at_least("threads", self.threads, 1)
        if self.threads > MOST_THREADS:
            raise InputError(f"threads is {self.threads}; it must be at most {MOST_THREADS}")
        if self.device not in DEVICES:
            raise InputError(f"device is {self.device!r}; it must be one of: {', '.join(DEVICES)}")


@dataclass(frozen=True)
class EngineConfig:
    """How requests share the model.

    Attributes:
        cache_tokens: tokens that the key-value cache holds; None chooses from the model and the memory.
        max_batch_tokens: most tokens that one step computes; longer prompts are computed in chunks.
        max_sequences: most requests that run together.
        prefill_chunk_tokens: most tokens of prompts that a step computes while other requests decode; the more, the
            later their next token. None is 64 on a CPU and 512 on a GPU, which takes hardly longer for so many.
        attention_interval: collect attention statistics on every n-th step (and on steps of requests that ask for
            them); 0 never does.
        max_waiting_requests: most answers that wait for their first step; more requests are refused.
        max_waiting_tokens: most prompt tokens of such answers.
        prefix_cache: keep computed blocks for later requests that start with the same tokens.
        speculative_tokens: most draft tokens of a step, for all its requests together (speculative decoding by prompt
            lookup); the model checks them, so completions stay as they are, up to rounding. 0 is off; None is 8 on a
            CPU, and 0 on a GPU or with an int8 cache.
    """

    cache_tokens: int | None = None
    max_batch_tokens: int = 2048
    max_sequences: int = 64
    attention_interval: int = 8
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 2**20
    prefix_cache: bool = True
    prefill_chunk_tokens: int | None = None
    speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.cache_tokens is not None:
            _at_least("cache_tokens", self.cache_tokens, 1)
        _at_least("max_sequences", self.max_sequences, 1)
        # A prompt must get on even while all other sequences decode.
        _at_least("max_batch_tokens", self.max_batch_tokens, self.max_sequences)
        _at_least("attention_interval", self.attention_interval, 0)
        _at_least("max_waiting_requests", self.max_waiting_requests, 1)
        _at_least("max_waiting_tokens", self.max_waiting_tokens, 1)
        if self.prefill_chunk_tokens is not None:
            _at_least("prefill_chunk_tokens", self.prefill_chunk_tokens, 1)
        if self.speculative_tokens is not None:
            _at_least("speculative_tokens", self.speculative_tokens, 0)
        bounded = ("max_batch_tokens", "prefill_chunk_tokens", "max_waiting_requests", "max_waiting_tokens")
        for name in (*bounded, "speculative_tokens"):
            if (getattr(self, name) or 0) > MOST:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at most {MOST}")


@dataclass(frozen=True)
class MetricsConfig:
    """What `/metrics` shows of attention.

    Attributes:
        attention_metrics: a series per "head" or per "layer"; "off" collects nothing but what a request asks for.
        attention_series_limit: most heads (of all layers) with series of their own; past it there is one per layer.
        attention_window: collected steps that the gauges are means over.
        dispersion_threshold: a head is dispersed while its smoothed normalized entropy is at least this ...
        dispersion_tokens: ... and has been for so many collected tokens. Tokens, not seconds: without traffic there is
            nothing to say about a head.
        dispersion_half_life: collected tokens after which a token has half its weight in the smoothed entropy.
        attention_baseline: file of `sharp baseline` to compare with; None compares with nothing.
        drift_half_life: collected tokens after which a token has half its weight in that comparison.
    """

    attention_metrics: str = "head"
    attention_series_limit: int = 2048
    attention_window: int = 64
    dispersion_threshold: float = 0.9
    dispersion_tokens: int = 1024
    dispersion_half_life: int = 1024
    attention_baseline: Path | None = None
    drift_half_life: int = 4096

    def __post_init__(self) -> None:
        if self.attention_metrics not in ATTENTION_LEVELS:
            raise InputError(
                f"attention_metrics is {self.attention_metrics!r}; it must be one of: {', '.join(ATTENTION_LEVELS)}"
            )
        _at_least("attention_series_limit", self.attention_series_limit, 0)
        _at_least("attention_window", self.attention_window, 1)
        if not 0 < self.dispersion_threshold <= 1:
            raise InputError(f"dispersion_threshold is {self.dispersion_threshold}; it must be above 0 and at most 1")
        _at_least("dispersion_tokens", self.dispersion_tokens, 0)
        _at_least("dispersion_half_life", self.dispersion_half_life, 1)
        _at_least("drift_half_life", self.drift_half_life, 1)


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens and what it accepts.

    Attributes:
        host: address that both ports are bound to.
        grpc_port: 0 picks a free one.
        http_port: 0 picks a free one.
        max_message_bytes: largest gRPC message, in and out, and largest body of an HTTP request.
        max_unread_messages: messages that may wait for a client to read them before its request is stopped.
        grace_seconds: how long running requests may go on after SIGTERM.
        stall_seconds: a step of the engine that takes longer makes health say that the server does not serve.
        tls: certificate and key of both ports; None is plain text.
        token_file: file of the bearer tokens that may ask; None lets everyone ask.
        log_format: "text", or "json": every line is an object.
        log_prompts: write prompts into the log.
        otlp_traces_endpoint: where traces are sent to, over OTLP (gRPC); None makes none.
        model_sampling: what a request leaves out of temperature, top-k and the like is as the model's checkpoint says.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    max_message_bytes: int = 64 * MIB
    max_unread_messages: int = 4096
    grace_seconds: float = 5.0
    stall_seconds: float = 120.0
    tls: TlsConfig | None = None
    token_file: Path | None = None
    log_format: str = "text"
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None
    model_sampling: bool = True

    def __post_init__(self) -> None:
        if self.log_format not in LOG_FORMATS:
            raise InputError(f"log_format is {self.log_format!r}; it must be one of: {', '.join(LOG_FORMATS)}")
        for name in ("grpc_port", "http_port"):
            _at_least(name, getattr(self, name), 0)
            if getattr(self, name) > 65535:
                raise InputError(f"{name} is {getattr(self, name)}; it must be from 0 to 65535")


@dataclass(frozen=True)
class Settings:
    """All settings of a server."""

    server: ServerConfig
    engine: EngineConfig
    metrics: MetricsConfig
    backend: BackendConfig


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InputError(f"{name} is {value}; it must be at least {low}")
