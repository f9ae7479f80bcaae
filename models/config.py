"""`SharpConfig`, the configuration that defines the shape of a `SharpForCausalLM` or `SharpForMaskedLM`."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sharp.core.errors import InputError
from sharp.models.byte_tokenizer import VOCAB_SIZE as BYTES_VOCAB_SIZE
from sharp.models.norms import NormDefinition, get_norm
from sharp.plugins.op.torch_normalizers import DEFAULT_TEMPERATURE

Positions = Literal["none", "rope", "alibi", "nape"]
RopeScaling = Literal["linear", "llama3"]
TokenizerName = Literal["none", "bytes"]

MOST_SIZE = 2**31 - 1  # kernels count in int32
MOST_LAYERS = 1024  # a damaged configuration could otherwise build layers for hours
LEAST_ALPHA = 1 + 2**-23  # the smallest number above 1 in float32
LEAST_TEMPERATURE = 1e-6
MOST_NUMBER = 3e38  # just below the largest float32
GAMMA_LIMIT = 8.0  # (ln 131,072)^8 is far below the largest float32


def check_norm_options(
    alpha: float, temperature: float, temperature_coefficients: tuple[float, ...], entropy_threshold: float
) -> None:
    """Check the options of a norm, whose limits are those of float32; they are checked even if the norm ignores them.

    `alpha` is entmax's, `temperature` that of fixed-temperature, and the coefficients (highest power first) with the
    entropy threshold (nats) are those of adaptive temperature.

    Raises:
        InputError: a value is out of range; the message names field, value and limit.
    """
    # Limits are those of float32, because the attributes of an ONNX node are float32.
    if not LEAST_ALPHA <= alpha <= MOST_NUMBER:
        raise InputError(f"alpha is {alpha}, but must be above 1 and finite in float32")
    if not LEAST_TEMPERATURE <= temperature <= 1 / LEAST_TEMPERATURE:
        raise InputError(
            f"temperature is {temperature}, but must be above 0, "
            f"from {LEAST_TEMPERATURE:g} to {1 / LEAST_TEMPERATURE:g}"
        )
    if not temperature_coefficients or not all(
        abs(coefficient) <= MOST_NUMBER for coefficient in temperature_coefficients
    ):
        raise InputError("temperature_coefficients must be one or more finite numbers (float32), highest power first")
    if not 0 <= entropy_threshold <= MOST_NUMBER:
        raise InputError(f"entropy_threshold is {entropy_threshold}, but must be at least 0 and finite in float32")


def check_gamma(gamma: float | None, norm: str) -> None:
    """Check the fixed exponent of a length scale; None (a learned exponent) is right for every norm.

    Raises:
        InputError: `norm` is unknown or has no such exponent, or the number is not from -8 to 8.
    """
    if gamma is None:
        return
    if get_norm(norm).scale_kind not in ("head", "token"):
        raise InputError(f"norm {norm} has no exponent gamma to fix; leave it out, or choose asentmax")
    if not (math.isfinite(gamma) and abs(gamma) <= GAMMA_LIMIT):
        raise InputError(f"gamma is {gamma}, but must be from {-GAMMA_LIMIT} to {GAMMA_LIMIT}")


WITH_ONSET = ("log-power", "llama4")


def check_length_onset(onset: int | None, norm: str) -> None:
    """Check the number of tokens beyond which a length scale grows; None (the default) is right for every norm.

    Raises:
        InputError: `norm` has no such number, or the number is out of range.
    """
    if onset is None:
        return
    if norm not in WITH_ONSET:
        raise InputError(f"norm {norm} has no length_onset; leave it out, or choose {' or '.join(WITH_ONSET)}")
    if not 1 <= onset <= MOST_SIZE:
        raise InputError(f"length_onset is {onset}, but must be from 1 to {MOST_SIZE} tokens")


@dataclass(frozen=True)
class SharpConfig:
    """The sizes, attention scheme and special tokens of a model, checked when the configuration is made.

    The model is a decoder if `causal`, otherwise an encoder. `alpha` 0 means the norm's default. `gamma` fixes the
    exponent of learned length scales (`sharp.models.query_scale`). `temperature` divides q k under norm
    fixed-temperature and is ignored under other norms. `trained_context` is the longest sequence seen in training,
    `max_context` the longest sequence that may be served. `rope_factor` and `rope_scaling` stretch RoPE
    (`sharp.models.positions.inverse_frequency`); a factor of 1 changes nothing. `tokenizer` says what token ids stand
    for: `bytes` is `sharp.models.byte_tokenizer`, `none` leaves this open. `bos_token_id` begins a text,
    `eos_token_ids` end a text.

    Raises:
        InputError: a field has a value that no model can have; the message names field, value and limit.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm: str = "softmax"
    positions: Positions = "rope"
    trained_context: int = 512
    max_context: int = 65536
    alpha: float = 0.0
    gamma: float | None = None
    temperature: float = 1.0
    temperature_coefficients: tuple[float, ...] = DEFAULT_TEMPERATURE
    entropy_threshold: float = 0.5
    causal: bool = True
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    rope_scaling: RopeScaling = "linear"
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = True
    tokenizer: TokenizerName = "none"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.alpha == 0.0:
            object.__setattr__(self, "alpha", get_norm(self.norm).alpha)
        for field in ("temperature_coefficients", "eos_token_ids"):  # JSON has lists, not tuples
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for field in ("rope_theta", "rope_factor", "rms_norm_eps"):
            if type(value := getattr(self, field)) is int:  # torch takes no integers beyond 64 bits
                object.__setattr__(self, field, float(value))
        self._check()

    @property
    def scheme(self) -> NormDefinition:
        """The entry of `norm` in the registry."""
        return get_norm(self.norm)

    @property
    def value_dim(self) -> int:
        """The number of channels of a value, which is that of a key in models of Sharp's own."""
        return self.head_dim

    @property
    def scale(self) -> float:
        """The factor of the logits q k: head_dim^-0.5, divided by the temperature under norm fixed-temperature."""
        return float(self.head_dim**-0.5) / self.fixed_temperature

    @property
    def fixed_temperature(self) -> float:
        """The temperature that divides the logits under norm fixed-temperature; 1 under every other norm."""
        return self.temperature if self.norm == "fixed-temperature" else 1.0

    def _check(self) -> None:
        """Check the norm, that sizes are whole numbers within limits and that heads agree; else raise InputError."""
        get_norm(self.norm)
        for field in (
            *("vocab_size", "hidden_size", "intermediate_size", "layers", "q_heads", "kv_heads", "head_dim"),
            *("trained_context", "max_context"),
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_SIZE:
                raise InputError(f"{field} is {value!r}, but must be a whole number from 1 to {MOST_SIZE}")
        if self.layers > MOST_LAYERS:
            raise InputError(f"layers is {self.layers}, but must be at most {MOST_LAYERS}")
        if self.q_heads % self.kv_heads:
            raise InputError(f"q_heads is {self.q_heads}, but must be a multiple of kv_heads ({self.kv_heads})")
        for field, known in (("positions", Positions), ("rope_scaling", RopeScaling), ("tokenizer", TokenizerName)):
            if getattr(self, field) not in get_args(known):
                raise InputError(
                    f"{field} is {getattr(self, field)!r}, but must be one of: {', '.join(get_args(known))}"
                )
        for field in ("causal", "tie_embeddings"):
            if not isinstance(getattr(self, field), bool):
                raise InputError(f"{field} is {getattr(self, field)!r}, but must be true or false")
        if self.positions == "rope" and self.head_dim % 2:
            raise InputError(f"head_dim is {self.head_dim}, but must be even for positions 'rope'")
        if self.positions == "nape" and self.q_heads < 2:
            raise InputError("q_heads is 1, but must be at least 2 for positions 'nape', which halves them")
        if self.max_context < self.trained_context:
            raise InputError(
                f"max_context is {self.max_context}, but must be at least trained_context ({self.trained_context})"
            )
        check_gamma(self.gamma, self.norm)
        check_norm_options(self.alpha, self.temperature, self.temperature_coefficients, self.entropy_threshold)
        for field in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, field)
            if not 0 < value <= MOST_NUMBER:
                raise InputError(f"{field} is {value}, but must be above 0 and finite in float32")
        if not (math.isfinite(self.rope_factor) and self.rope_factor >= 1):
            raise InputError(f"rope_factor is {self.rope_factor}, but must be at least 1")
        if self.tokenizer == "bytes" and self.vocab_size < BYTES_VOCAB_SIZE:
            raise InputError(
                f"vocab_size is {self.vocab_size}, but must be at least {BYTES_VOCAB_SIZE} for tokenizer 'bytes'"
            )
        specials = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        for token in specials:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise InputError(f"special token {token!r} is outside the vocabulary of {self.vocab_size}")
