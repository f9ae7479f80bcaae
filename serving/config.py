"""The configuration of every component: one frozen dataclass each, read once and printed at start.

A field with a `Setting` is a setting of `sharp-serve`. Other fields are for the library and the tests.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import NonNegativeFloat, PositiveFloat

from sharp.core.machine import available_cpus
from sharp.serving.api.errors import InputError
from sharp.serving.api_config import ApiConfig
from sharp.serving.encoder_config import EncoderConfig
from sharp.serving.setting import Setting, check_settings

MIB = 2**20
MOST = 2**31 - 1  # limit for numbers of tokens and sequences, which must fit the protocol's 32-bit fields
# A step is computed as a whole. Its memory grows with its number of tokens, and no request progresses before its end.
MOST_BATCH_TOKENS = 2**17
MOST_SECONDS = 2_000_000  # gRPC counts milliseconds in 31 bits, and a timer of the process takes no infinity
SECONDS_IN_WORDS = f"above 0 and at most {MOST_SECONDS}"
MOST_THREADS = 1024  # starting 100,000 threads took minutes and could not be interrupted
# The module and class of each backend. Only the chosen backend is imported.
BACKENDS = {
    "onnxruntime": "sharp.serving.backends.onnxruntime:OnnxRuntimeBackend",
    "tensorrt": "sharp.serving.backends.tensorrt:TensorRtBackend",
}


@dataclass(frozen=True)
class TlsConfig:
    """The files of TLS: certificate and key of both ports, and perhaps the CAs whose clients may connect."""

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
        """The files of the certificate and the key, and that of the clients' CAs if it is set."""
        return (self.cert, self.key, *(() if self.client_ca is None else (self.client_ca,)))


@dataclass(frozen=True)
class ServerConfig:
    """The settings of the server: addresses, limits, access and logging.

    Attributes:
        max_message_bytes: the largest gRPC message, in and out, and the largest body of an HTTP request.
        max_unread_messages: the number of messages that may wait for a client; beyond it the client's request is
            stopped.
        tls: the certificate and key; None means plain text.

    Raises:
        InputError: a value is not one of the choices of its setting, or out of range.
    """

    host: Annotated[str, Setting("Address that the ports of HTTP and gRPC are bound to.", common=True)] = "127.0.0.1"
    grpc_port: Annotated[
        int,
        Setting(
            "Port of gRPC; 0 chooses a free port.", at_least=0, at_most=65535, limits="from 0 to 65535", common=True
        ),
    ] = 50051
    http_port: Annotated[
        int,
        Setting(
            "Port of the OpenAI API and /metrics; 0 chooses a free port.",
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
            "Maximum connections of a port. A further connection closes the one that has been idle longest; if all "
            "connections serve requests, only health is served. The limit of open files can lower the number.",
            at_least=1,
            at_most=2**20,
            group="Limits",
        ),
    ] = 1024
    max_streams: Annotated[
        int,
        Setting(
            "Maximum concurrent calls on one gRPC connection; further calls wait.",
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
            "How long a connection without a request is kept. Choose more than the 60 s of usual proxies, because a "
            "request that arrives while the server closes its connection is lost.",
            at_most=MOST_SECONDS,
            limits=SECONDS_IN_WORDS,
            group="Limits",
        ),
    ] = 75.0
    max_buffered_bytes: Annotated[
        int,
        Setting("Maximum bytes of all requests that are being received or prepared.", at_least=MIB, group="Limits"),
    ] = 128 * MIB
    grace_seconds: Annotated[
        NonNegativeFloat,
        Setting(
            "How long running requests may continue after SIGTERM. 3 s later the process exits with code 124, "
            "even if requests still run.",
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
            "A bearer token, instead of a file. Prefer the environment variable: other users of the machine can see "
            "flags.",
            default="no authentication",
            group="Security",
        ),
    ] = None
    prefix_isolation: Annotated[
        str,
        Setting(
            "Which requests share the prefix cache: those with the same token, or all. If all share it, the time of a "
            "response and cached_tokens tell whether somebody else sent the same start of a prompt. Requests without a "
            "token always share it.",
            choices=("token", "none"),
            group="Security",
        ),
    ] = "token"
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
    """The settings for running the model. Values are checked at creation.

    Raises:
        InputError: a value is not one of the choices of its setting, or out of range.
    """

    name: Annotated[str, Setting(f"Runtime of the model: {' or '.join(BACKENDS)}.", name="backend")] = "onnxruntime"
    device: Annotated[
        str,
        Setting(
            "Device for the model: auto, cpu, cuda or cuda:N, the GPU with the number N (else 0). auto is the first "
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
            "Batch sizes (numbers of sequences) with a CUDA graph, separated by commas. Larger steps run without a "
            "graph.",
            default="powers of two",
        ),
    ] = ""
    weights: Annotated[
        str,
        Setting(
            "Where the weights are on a CPU: copy reads them into memory and compares the copy with the checksums; map "
            "leaves them in their files; if a file changes, the server stops being ready. auto copies if memory has "
            "room for three times the size of the files.",
            choices=("auto", "copy", "map"),
            group="Memory",
        ),
    ] = "auto"
    allow_unverified: Annotated[bool, Setting("Serve a model even if it failed its verification.")] = False
    model_version: Annotated[
        str,
        Setting(
            "Refuse a model folder of another version. The version is the SHA-256 of sharp.json, or its first 12 "
            "digits or more, as sharp_model_info has it.",
            default="any",
        ),
    ] = ""
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
        if re.fullmatch(r"|[0-9a-f]{12,64}", self.model_version) is None:
            raise InputError(
                f"model_version is {self.model_version!r}; it must be 12 to 64 of the hexadecimal digits that "
                "sha256sum prints for sharp.json"
            )

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The distinct numbers in `cuda_graph_sizes`, in ascending order; empty means powers of two."""
        return tuple(sorted({int(size) for size in self.cuda_graph_sizes.split(",") if size}))

    @property
    def gpu(self) -> int:
        """The number of the GPU: N of cuda:N, else 0."""
        return int(self.device.partition(":")[2] or 0)


@dataclass(frozen=True)
class EngineConfig:
    """The settings for sharing the model among requests. Values are checked at creation.

    Raises:
        InputError: a value is not one of the choices of its setting, or out of range.
    """

    cache_tokens: Annotated[
        int | None,
        Setting(
            "Size of the key-value cache in tokens.",
            default="the longest context, at least 32768; at most half of the free memory; on a GPU 90 % of it",
            at_least=1,
            group="Memory",
            common=True,
        ),
    ] = None
    max_batch_tokens: Annotated[
        int,
        Setting(
            "Maximum tokens per step; longer prompts are computed in chunks. At least max_sequences.",
            at_most=MOST_BATCH_TOKENS,
            aliases=("--max-num-batched-tokens",),
        ),
    ] = 2048
    max_sequences: Annotated[
        int, Setting("Maximum running sequences.", at_least=1, aliases=("--max-num-seqs",), common=True)
    ] = 64
    max_context: Annotated[
        int | None,
        Setting(
            "Maximum tokens of a sequence, prompt and completion together.",
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
            "Maximum prompt tokens per step while other sequences decode. A larger number delays their next token.",
            default="64 on a CPU, 512 on a GPU",
            at_least=1,
            at_most=MOST,
        ),
    ] = None
    speculative_tokens: Annotated[
        int | None,
        Setting(
            "Maximum draft tokens per step, over all sequences (speculative decoding by prompt lookup); 0 turns it "
            "off. The model verifies them, so outputs are the same up to rounding.",
            default="8 on a CPU, 0 on a GPU or with an int8 or fp8 cache",
            at_least=0,
            at_most=MOST,
        ),
    ] = None
    async_scheduling: Annotated[
        str,
        Setting(
            "Plan the next step while a step is computed, and commit a step while the next one is computed. Outputs "
            "are the same. auto means on for a GPU and off for a CPU.",
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
            "Whitespace in JSON for a schema, where the request does not choose it: compact has none; flexible has as "
            "much as the model writes, which with a small model can be endless.",
            choices=("compact", "flexible"),
            group="API",
        ),
    ] = "compact"
    max_waiting_requests: Annotated[
        int,
        Setting("Maximum waiting sequences; further requests are refused.", at_least=1, at_most=MOST, group="Limits"),
    ] = 1024
    max_waiting_tokens: Annotated[
        int, Setting("Maximum prompt tokens of all waiting sequences.", at_least=1, at_most=MOST, group="Limits")
    ] = 2**20
    fair_shares: Annotated[
        bool,
        Setting(
            "Share the model evenly among clients, which are told apart by their tokens, and without tokens by their "
            "addresses: steps, running sequences, cache blocks and the queue are shared. Off, requests run in the "
            "order of priority and arrival, regardless of the client.",
            group="Limits",
        ),
    ] = True
    priorities: Annotated[
        bool,
        Setting(
            "Use the priority of a request, from -10 to 10: each unit is worth 60 s of waiting, among the requests of "
            "the same client. Off, priorities have no effect.",
            group="Limits",
        ),
    ] = True
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
    """The settings for the attention metrics in `/metrics`.

    Attributes:
        attention_window: the number of collected steps over which gauges are means.
        dispersion_half_life: collected tokens after which a token has half its weight in the smoothed entropy.
        drift_half_life: collected tokens after which a token has half its weight in the comparison with the baseline.

    Raises:
        InputError: a value is not one of the choices of its setting, or out of range.
    """

    attention_metrics: Annotated[
        str,
        Setting(
            "Series of attention metrics: one per layer or per head; /metrics?attention=head has those of heads "
            "regardless of this setting. off collects statistics only for requests that return attention.",
            choices=("off", "layer", "head"),
        ),
    ] = "layer"
    metric_aliases: Annotated[
        str,
        Setting("Repeat the metrics of requests under vLLM's names, for its dashboards.", choices=("none", "vllm")),
    ] = "none"
    attention_series_limit: Annotated[
        int,
        Setting(
            "Maximum number of heads with one series each. With more heads there is one series per layer.", at_least=0
        ),
    ] = 2048
    attention_window: int = 64
    # The following are counted in tokens, not seconds, because without traffic nothing new is known about a head.
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
        int,
        Setting(
            "Collected tokens for which a head must stay above dispersion_threshold before it counts as dispersed.",
            at_least=0,
        ),
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
    """The whole configuration of a server, one dataclass per component."""

    server: ServerConfig
    engine: EngineConfig
    metrics: MetricsConfig
    backend: BackendConfig
    api: ApiConfig = field(default_factory=ApiConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
