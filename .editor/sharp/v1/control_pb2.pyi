from sharp.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "models", "backend", "kernels", "threads", "cache_tokens", "block_size", "max_batch_tokens", "max_sequences", "prefill_chunk_tokens", "prefix_cache", "max_waiting_requests", "max_waiting_tokens", "speculative_tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: str
    models: _containers.RepeatedScalarFieldContainer[str]
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
    def __init__(self, version: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., backend: _Optional[str] = ..., kernels: _Optional[bool] = ..., threads: _Optional[int] = ..., cache_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., prefill_chunk_tokens: _Optional[int] = ..., prefix_cache: _Optional[bool] = ..., max_waiting_requests: _Optional[int] = ..., max_waiting_tokens: _Optional[int] = ..., speculative_tokens: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "source", "architecture", "norm", "layers", "q_heads", "kv_heads", "head_dim", "value_dim", "vocab_size", "max_context", "trained_context", "positions", "tokenizer", "eos_token_ids", "accepts", "sampling")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    Q_HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TRAINED_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    architecture: str
    norm: Norm
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    vocab_size: int
    max_context: int
    trained_context: int
    positions: str
    tokenizer: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    accepts: Accepts
    sampling: _inference_pb2.Sampling
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., architecture: _Optional[str] = ..., norm: _Optional[_Union[Norm, _Mapping]] = ..., layers: _Optional[int] = ..., q_heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., trained_context: _Optional[int] = ..., positions: _Optional[str] = ..., tokenizer: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., accepts: _Optional[_Union[Accepts, _Mapping]] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ...) -> None: ...

class Accepts(_message.Message):
    __slots__ = ("text", "guided", "n", "logprobs", "stop_strings", "logit_bias")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    text: bool
    guided: bool
    n: int
    logprobs: int
    stop_strings: int
    logit_bias: int
    def __init__(self, text: _Optional[bool] = ..., guided: _Optional[bool] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., stop_strings: _Optional[int] = ..., logit_bias: _Optional[int] = ...) -> None: ...

class Norm(_message.Message):
    __slots__ = ("name", "normalizer", "trained", "alpha", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NORMALIZER_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    normalizer: str
    trained: bool
    alpha: float
    parameters: _containers.RepeatedCompositeFieldContainer[NormParameter]
    def __init__(self, name: _Optional[str] = ..., normalizer: _Optional[str] = ..., trained: _Optional[bool] = ..., alpha: _Optional[float] = ..., parameters: _Optional[_Iterable[_Union[NormParameter, _Mapping]]] = ...) -> None: ...

class NormParameter(_message.Message):
    __slots__ = ("name", "values", "origin")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: _containers.RepeatedScalarFieldContainer[float]
    origin: str
    def __init__(self, name: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ..., origin: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("requests_running", "requests_waiting", "cache_usage_ratio", "draining")
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    CACHE_USAGE_RATIO_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    requests_running: int
    requests_waiting: int
    cache_usage_ratio: float
    draining: bool
    def __init__(self, requests_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., cache_usage_ratio: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
