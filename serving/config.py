"""The configuration of every component: one frozen dataclass each, read once and printed at start.

A field with a `Setting` is a setting of `sharp-serve`. Other fields are for the library and the tests.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import NonNegativeFloat, PositiveFloat

from sharp.serving.api.errors import InputError
from sharp.serving.api_config import ApiConfig
from sharp.serving.encoder_config import EncoderConfig
from sharp.serving.machine import available_cpus
from sharp.serving.setting import Setting, check_settings

MIB = 2**20
MOST = 2**31 - 1  # of tokens and sequences: more is no limit, and does not fit the protocol's 32-bit fields
# A step is computed as a whole: its memory grows with it, and no request progresses meanwhile.
MOST_BATCH_TOKENS = 2**17
MOST_SECONDS = 2_000_000  # gRPC counts milliseconds in 31 bits, and a timer of the process takes no infinity
SECONDS_IN_WORDS = f"above 0 and at most {MOST_SECONDS}"
MOST_THREADS = 1024  # starting 100,000 threads took minutes and could not be interrupted
# Where each backend is; only the chosen one is imported.
BACKENDS = {
    "onnxruntime": "sharp.serving.backends.onnxruntime:OnnxRuntimeBackend",
    "tensorrt": "sharp.serving.backends.tensorrt:TensorRtBackend",
}


@dataclass(frozen=True)
class TlsConfig:
    """Certificate and key of both ports."""

    cert: Annotated[
        Path, Setting("PEM certificate chain. With it both ports accept TLS only.", name="tls_cert", common=True)
    ]
    key: Annotated[Path, Setting("PEM key of the certificate.", name="tls_key", common=True)]
    client_ca: Annotated[
        Path | None,
        Setting(
            "PEM certificates of CAs. Clients must present a certificate of one of them (mTLS).", name="tls_client_ca"
        ),
    ] = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All files."""
        return (self.cert, self.key, *(() if self.client_ca is None else (self.client_ca,)))


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, whom it serves and what it logs.

    Attributes:
        max_message_bytes: largest gRPC message, in and out, and largest body of an HTTP request.
        max_unread_messages: messages that may wait for a client; beyond that its request is stopped.
        tls: None is plain text.
    """

    host: Annotated[str, Setting("Address that both ports are bound to.", common=True)] = "127.0.0.1"
    grpc_port: Annotated[
        int,
        Setting("Port of gRPC; 0 picks a free one.", at_least=0, at_most=65535, limits="from 0 to 65535", common=True),
    ] = 50051
    http_port: Annotated[
        int,
        Setting(
            "Port of the OpenAI API and /metrics; 0 picks a free one.",
            aliases=("--port",),
            at_least=0,
            at_most=65535,
            limits="from 0 to 65535",
            common=True,
        ),
    ] = 8000
    max_message_bytes: int = 64 * MIB
    max_unread_messages: int = 4096
    max_connections: Annotated[
        int,
        Setting(
            "Most connections of a port. Beyond it the one that has waited longest for its client is closed, and where "
            "all serve a request, only health is served. It is lowered to what the limit of open files allows.",
            at_least=1,
            at_most=2**20,
            group="Limits",
        ),
    ] = 1024
    max_streams: Annotated[
        int,
        Setting(
            "Most calls that run together on one gRPC connection; further ones wait.",
            at_least=1,
            at_most=MOST,
            group="Limits",
        ),
    ] = 256
    header_seconds: Annotated[
        PositiveFloat,
        Setting(
            "How long a client may take for the header of a request, or for the handshake.",
            at_most=MOST_SECONDS,
            limits=SECONDS_IN_WORDS,
            group="Limits",
        ),
    ] = 10.0
    body_seconds: Annotated[
        PositiveFloat,
        Setting(
            "How long a client may take for the body of a request, or for its message.",
            at_most=MOST_SECONDS,
            limits=SECONDS_IN_WORDS,
            group="Limits",
        ),
    ] = 30.0
    idle_seconds: Annotated[
        PositiveFloat,
        Setting(
            "How long a connection without a request is kept. Longer than the 60 s for which proxies keep theirs, as a "
            "request that comes when the server closes it is lost.",
            at_most=MOST_SECONDS,
            limits=SECONDS_IN_WORDS,
            group="Limits",
        ),
    ] = 75.0
    max_buffered_bytes: Annotated[
        int,
        Setting(
            "Most bytes of requests that are being received or prepared, of all clients.", at_least=MIB, group="Limits"
        ),
    ] = 128 * MIB
    grace_seconds: Annotated[
        NonNegativeFloat,
        Setting(
            "How long running requests may continue after SIGTERM. 3 s later the process exits with code 124, "
            "whatever still runs.",
            at_most=MOST_SECONDS,
            limits=f"at least 0 and at most {MOST_SECONDS}",
            group="Limits",
        ),
    ] = 5.0
    stall_seconds: Annotated[
        PositiveFloat,
        Setting(
            "While an engine step takes longer than this, health reports 'not serving'.",
            at_most=MOST_SECONDS,
            limits=SECONDS_IN_WORDS,
            group="Observability",
        ),
    ] = 120.0
    tls: TlsConfig | None = None
    token_file: Annotated[
        Path | None,
        Setting(
            "File of bearer tokens, one per line. Without a token only health, metrics, version and the page are "
            "accessible.",
            default="no authentication",
            group="Security",
            common=True,
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Setting(
            "A bearer token itself, in place of a file. Other users of the machine see flags; better as a variable.",
            default="no authentication",
            group="Security",
        ),
    ] = None
    log_format: Annotated[str, Setting("Format of log lines.", choices=("text", "json"), group="Observability")] = (
        "text"
    )
    log_prompts: Annotated[bool, Setting("Write the prompts of requests into the log.", group="Observability")] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Setting(
            "Send OpenTelemetry traces to this address, such as http://127.0.0.1:4317.",
            default="none",
            group="Observability",
        ),
    ] = None
    model_sampling: Annotated[
        bool,
        Setting(
            "Take temperature, top-k, top-p, min-p and repetition penalty from the checkpoint's "
            "generation_config.json where a request leaves them out.",
            group="API",
        ),
    ] = True

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class BackendConfig:
    """How the model is run."""

    name: Annotated[str, Setting(f"Runtime of the model: {' or '.join(BACKENDS)}.", name="backend")] = "onnxruntime"
    device: Annotated[
        str,
        Setting(
            "Where the model runs: auto, cpu, cuda or cuda:N, the GPU with the number N (else 0). auto is the first "
            "GPU if there is one, with ONNX Runtime's execution provider and our kernel library; else the CPU.",
            common=True,
        ),
    ] = "auto"
    threads: Annotated[
        int,
        Setting(
            "Threads of the runtime.",
            default="one per processor that the process may use",
            at_least=1,
            at_most=MOST_THREADS,
            common=True,
        ),
    ] = field(default_factory=available_cpus)
    kernels: Annotated[
        bool, Setting("Run attention in our kernels. Off, it runs as standard ops: slow, for comparison.")
    ] = True
    cuda_graphs: Annotated[
        bool,
        Setting(
            "Replay decode steps as CUDA graphs, on a GPU with our kernels in onnxruntime. They are captured at start, "
            "as far as memory allows."
        ),
    ] = True
    cuda_graph_sizes: Annotated[
        str,
        Setting(
            "Numbers of sequences that there are CUDA graphs for, separated by commas. Steps of more run without one.",
            default="powers of two",
        ),
    ] = ""
    allow_unverified: Annotated[bool, Setting("Serve a model even if it failed its verification.")] = False
    verify_files: Annotated[
        bool, Setting("Compare the model's files with their SHA-256 in sharp.json before they are loaded.")
    ] = True

    def __post_init__(self) -> None:
        check_settings(self)
        if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is None:
            raise InputError(f"device is {self.device!r}; it must be auto, cpu, cuda or cuda:N")
        if re.fullmatch(r"|[1-9]\d{0,4}(,[1-9]\d{0,4})*", self.cuda_graph_sizes) is None:
            raise InputError(
                f"cuda_graph_sizes is {self.cuda_graph_sizes!r}; it must be numbers above 0, separated by commas"
            )

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Of `cuda_graph_sizes`, in order and each once; none for powers of two."""
        return tuple(sorted({int(size) for size in self.cuda_graph_sizes.split(",") if size}))

    @property
    def gpu(self) -> int:
        """The number of the GPU: N of cuda:N, else 0."""
        return int(self.device.partition(":")[2] or 0)


@dataclass(frozen=True)
class EngineConfig:
    """How requests share the model."""

    cache_tokens: Annotated[
        int | None,
        Setting(
            "Tokens that the key-value cache holds.",
            default="the longest context, at least 32768; at most half of the free memory; on a GPU 90 % of it",
            at_least=1,
            group="Memory",
            common=True,
        ),
    ] = None
    max_batch_tokens: Annotated[
        int,
        Setting(
            "Most tokens that one step computes; longer prompts are computed in chunks. At least max_sequences.",
            at_most=MOST_BATCH_TOKENS,
            aliases=("--max-num-batched-tokens",),
        ),
    ] = 2048
    max_sequences: Annotated[
        int, Setting("Most sequences that run together.", at_least=1, aliases=("--max-num-seqs",), common=True)
    ] = 64
    max_context: Annotated[
        int | None,
        Setting(
            "Longest sequence that one request may grow to, in tokens.",
            default="what the model takes and the cache holds",
            at_least=1,
            at_most=MOST,
            aliases=("--max-model-len",),
            group="Memory",
            common=True,
        ),
    ] = None
    gpu_memory_share: Annotated[
        float,
        Setting(
            "Share of the memory of a GPU that the server may use, for a cache whose size is not given.",
            above=0,
            at_most=1,
            limits="above 0 and at most 1",
            aliases=("--gpu-memory-utilization",),
            group="Memory",
        ),
    ] = 0.9
    prefill_chunk_tokens: Annotated[
        int | None,
        Setting(
            "Most prompt tokens that one step computes while other sequences decode. More delays their next token.",
            default="64 on a CPU, 512 on a GPU",
            at_least=1,
            at_most=MOST,
        ),
    ] = None
    speculative_tokens: Annotated[
        int | None,
        Setting(
            "Most draft tokens per step, over all sequences (speculative decoding by prompt lookup); 0 turns it off. "
            "The model verifies them, so outputs are the same up to rounding.",
            default="8 on a CPU, 0 on a GPU or with an int8 or fp8 cache",
            at_least=0,
            at_most=MOST,
        ),
    ] = None
    async_scheduling: Annotated[
        str,
        Setting(
            "Plan the next step while one is computed, and commit that one while the next is. Outputs are the same. "
            "auto is on on a GPU and off on a CPU.",
            choices=("auto", "on", "off"),
        ),
    ] = "auto"
    prefix_cache: Annotated[
        bool,
        Setting(
            "Keep computed blocks for later prompts that start with the same tokens.",
            aliases=("--enable-prefix-caching/--no-enable-prefix-caching",),
            group="Memory",
        ),
    ] = True
    json_whitespace: Annotated[
        str,
        Setting(
            "Blanks in JSON that must match a schema and does not say it itself: none, or as many as the model writes, "
            "which of small models can be blanks without end.",
            choices=("compact", "flexible"),
            group="API",
        ),
    ] = "compact"
    max_waiting_requests: Annotated[
        int,
        Setting("Most sequences that wait; further requests are refused.", at_least=1, at_most=MOST, group="Limits"),
    ] = 1024
    max_waiting_tokens: Annotated[
        int, Setting("Most prompt tokens of sequences that wait.", at_least=1, at_most=MOST, group="Limits")
    ] = 2**20
    attention_interval: Annotated[
        int,
        Setting(
            "Collect attention statistics every n-th step, and in steps of requests with attention; 1 is every step, "
            "0 only for such requests.",
            at_least=0,
            group="Observability",
            common=True,
        ),
    ] = 8

    def __post_init__(self) -> None:
        check_settings(self)
        # A prompt must progress even while all other sequences decode.
        if self.max_batch_tokens < self.max_sequences:
            raise InputError(f"max_batch_tokens is {self.max_batch_tokens}; it must be at least {self.max_sequences}")


@dataclass(frozen=True)
class MetricsConfig:
    """What `/metrics` shows of attention.

    Attributes:
        attention_window: collected steps that the gauges are means over.
        dispersion_half_life: collected tokens after which a token has half its weight in the smoothed entropy.
        drift_half_life: collected tokens after which a token has half its weight in the comparison with the baseline.
    """

    attention_metrics: Annotated[
        str,
        Setting(
            "Series of attention metrics: one per layer or per head; /metrics?attention=head has those of heads "
            "whatever this says. off collects only what requests ask to see.",
            choices=("off", "layer", "head"),
        ),
    ] = "layer"
    metric_aliases: Annotated[
        str,
        Setting("Repeat the metrics of requests under vLLM's names, for its dashboards.", choices=("none", "vllm")),
    ] = "none"
    attention_series_limit: Annotated[
        int, Setting("Most heads with a series of their own. With more heads there is one per layer.", at_least=0)
    ] = 2048
    attention_window: int = 64
    # Tokens, not seconds: without traffic nothing is known of a head.
    dispersion_threshold: Annotated[
        float,
        Setting(
            "Smoothed normalized entropy from which a head counts as dispersed.",
            above=0,
            at_most=1,
            limits="above 0 and at most 1",
        ),
    ] = 0.9
    dispersion_tokens: Annotated[
        int, Setting("Collected tokens that a head must stay there before it counts as dispersed.", at_least=0)
    ] = 1024
    dispersion_half_life: int = 1024
    attention_baseline: Annotated[
        Path | None,
        Setting("File written by sharp baseline. Metrics then show the drift of entropies from it.", default="none"),
    ] = None
    drift_half_life: int = 4096

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("attention_window", "dispersion_half_life", "drift_half_life"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class Settings:
    """The configuration of a server."""

    server: ServerConfig
    engine: EngineConfig
    metrics: MetricsConfig
    backend: BackendConfig
    api: ApiConfig = field(default_factory=ApiConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
