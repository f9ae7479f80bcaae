"""`libsharp_cuda.so` from Python: its C structures, for tests and benchmarks that launch without a runtime."""

from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

from sharp.plugins.errors import SharpError
from sharp.plugins.ops.attributes import NORMALIZERS

TYPES = ("float32", "float16", "bfloat16", "int8", "fp8")
MOST_TEMPERATURE_TERMS = 8


class Attributes(Structure):
    """SharpAttributes of sharp_cuda.h."""

    _fields_ = (
        ("normalizer", c_int),
        ("scale", c_float),
        ("alpha", c_float),
        ("temperature_coefficients", c_float * MOST_TEMPERATURE_TERMS),
        ("temperature_terms", c_int32),
        ("entropy_threshold", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("causal", c_int32),
        ("stats_columns", c_int32),
    )


class Problem(Structure):
    """SharpPagedAttention of sharp_cuda.h; pointers are addresses of device memory."""

    _fields_ = (
        ("attributes", Attributes),
        *(
            (name, c_int64)
            for name in ("tokens", "q_heads", "kv_heads", "head_dim", "value_dim", "blocks", "block_size", "sequences")
        ),
        ("max_blocks", c_int64),
        ("multiprocessors", c_int64),
        ("type", c_int),
        ("cache_type", c_int),
        *((name, c_void_p) for name in ("query", "key", "value", "key_cache", "value_cache")),
        *((name, c_void_p) for name in ("key_scale", "value_scale", "key_screen", "key_shift")),
        *((name, c_void_p) for name in ("slot_mapping", "block_table", "query_start", "context_lens", "head_params")),
        ("head_params_width", c_int64),
        ("alibi", c_int32),
        ("screened", c_int32),
        *((name, c_void_p) for name in ("alibi_slopes", "collect_stats", "output", "stats")),
    )


class AttentionProblem(Structure):
    """SharpAttention of sharp_cuda.h; pointers are addresses of device memory."""

    _fields_ = (
        ("attributes", Attributes),
        *((name, c_int64) for name in ("batch", "q_heads", "kv_heads", "queries", "new_keys", "head_dim", "value_dim")),
        ("capacity", c_int64),
        ("multiprocessors", c_int64),
        ("has_past", c_int32),
        ("shared", c_int32),
        ("has_presents", c_int32),
        ("type", c_int),
        *((name, c_void_p) for name in ("query", "key", "value", "past_key", "past_value", "past_lens", "total_lens")),
        ("head_params", c_void_p),
        ("head_params_width", c_int64),
        ("alibi", c_int32),
        *((name, c_void_p) for name in ("alibi_slopes", "collect_stats", "output", "present_key", "present_value")),
        ("stats", c_void_p),
    )


class Sampling(Structure):
    """SharpSampling of sharp_cuda.h; pointers are addresses of memory that the device reads and writes."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab", c_int64),
        *((name, c_void_p) for name in ("logits", "indices", "samplings", "starts", "changes")),
        *((name, c_void_p) for name in ("candidates", "sampled")),
    )


def normalizer_number(name: str) -> int:
    """SharpNormalizer's value."""
    return NORMALIZERS.index(name)


class Library:
    """The library's functions.

    Raises:
        SharpError: it cannot be loaded, or a call failed; the message is the library's.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = CDLL(str(path))
        except OSError as error:
            raise SharpError(f"{path} cannot be loaded: {error}") from error
        self._library.sharp_cuda_last_error.restype = c_char_p
        self._library.sharp_cuda_workspace_bytes.argtypes = (POINTER(Problem), POINTER(c_size_t))
        self._library.sharp_cuda_prepare.argtypes = (POINTER(Problem),)
        self._library.sharp_cuda_paged_attention.argtypes = (POINTER(Problem), c_void_p, c_void_p)
        self._library.sharp_cuda_attention_workspace_bytes.argtypes = (POINTER(AttentionProblem), POINTER(c_size_t))
        self._library.sharp_cuda_prepare_attention.argtypes = (POINTER(AttentionProblem),)
        self._library.sharp_cuda_attention.argtypes = (POINTER(AttentionProblem), c_void_p, c_void_p)
        self._library.sharp_cuda_sample.argtypes = (POINTER(Sampling), c_void_p)

    def workspace_bytes(self, problem: Problem | AttentionProblem) -> int:
        """Device memory that calls up to this size need."""
        size = c_size_t()
        paged = isinstance(problem, Problem)
        ask = self._library.sharp_cuda_workspace_bytes if paged else self._library.sharp_cuda_attention_workspace_bytes
        self._check(ask(byref(problem), byref(size)))
        return size.value

    def add_kernels(self, folder: Path) -> None:
        """Add the kernels of a folder that `write_package` wrote."""
        self._check(self._library.sharp_cuda_add_kernels(str(folder).encode()))

    def has_kernel(self, name: str, capability: int) -> bool:
        """Whether there is code of a kernel for a compute capability (90 is 9.0)."""
        return int(self._library.sharp_cuda_find_kernel(name.encode(), capability)) == 0

    def prepare(self, problem: Problem | AttentionProblem) -> None:
        """Load the code that such a call launches."""
        paged = isinstance(problem, Problem)
        load = self._library.sharp_cuda_prepare if paged else self._library.sharp_cuda_prepare_attention
        self._check(load(byref(problem)))

    def prepare_sampling(self) -> None:
        """Load the code that samples."""
        self._check(self._library.sharp_cuda_prepare_sampling())

    def sample(self, sampling: Sampling, stream: int) -> None:
        """Put a call on a stream."""
        self._check(self._library.sharp_cuda_sample(byref(sampling), stream))

    def attention(self, problem: AttentionProblem, workspace: int, stream: int) -> None:
        """As `paged_attention`, for the op over contiguous keys."""
        self._check(self._library.sharp_cuda_attention(byref(problem), workspace, stream))

    def paged_attention(self, problem: Problem, workspace: int, stream: int) -> None:
        """Put the call on a stream; `workspace` is an address of device memory."""
        self._check(self._library.sharp_cuda_paged_attention(byref(problem), workspace, stream))

    def _check(self, status: int) -> None:
        if status:
            raise SharpError(self._library.sharp_cuda_last_error().decode())
