"""`SharpConfig`: everything that defines the shape of a `SharpForCausalLM` or `SharpForMaskedLM`."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sharp.models.byte_tokenizer import VOCAB_SIZE as BYTES_VOCAB_SIZE
from sharp.models.norms import Norm, get_norm
from sharp.plugins.errors import InputError
from sharp.plugins.ops.torch_normalizers import DEFAULT_TEMPERATURE

Positions = Literal["none", "rope", "alibi", "nape"]
RopeScaling = Literal["linear", "llama3"]
TokenizerName = Literal["none", "bytes"]

MOST_SIZE = 2**31 - 1  # kernels count in int32
MOST_LAYERS = 1024  # a damaged configuration must not keep us building layers for hours
LEAST_ALPHA = 1 + 2**-23  # float32 has none between
LEAST_TEMPERATURE = 1e-6
MOST_NUMBER = 3e38  # of float32
GAMMA_LIMIT = 8.0  # (ln 131,072)^8 is still far inside of float32


def check_norm_options(
    alpha: float, temperature: float, temperature_coefficients: tuple[float, ...], entropy_threshold: float
) -> None:
    """Check what a norm is set up with.

    Raises:
        InputError: a value cannot work; the message names field, value and limit.
    """
    # The attributes of a node are float32.
    if not LEAST_ALPHA <= alpha <= MOST_NUMBER:
        raise InputError(f"alpha is {alpha}, but must be above 1 and finite in float32")
    if not LEAST_TEMPERATURE <= temperature <= 1 / LEAST_TEMPERATURE:
        raise InputError(
            f"temperature is {temperature}, but must be above 0, "
            f"from {LEAST_TEMPERATURE:g} to {1 / LEAST_TEMPERATURE:g}"
        )
    if not temperature_coefficients or not all(abs(one) <= MOST_NUMBER for one in temperature_coefficients):
        raise InputError("temperature_coefficients must be one or more finite numbers (float32), highest power first")
    if not 0 <= entropy_threshold <= MOST_NUMBER:
        raise InputError(f"entropy_threshold is {entropy_threshold}, but must be at least 0 and finite in float32")


def check_gamma(gamma: float | None, norm: str) -> None:
    """Check the fixed exponent of a length scale.

    Raises:
        InputError: `norm` has no such exponent, or the number cannot work.
    """
    if gamma is None:
        return
    if get_norm(norm).scale_kind not in ("head", "token"):
        raise InputError(f"norm {norm} has no exponent gamma to fix; leave it out, or choose asentmax")
    if not (math.isfinite(gamma) and abs(gamma) <= GAMMA_LIMIT):
        raise InputError(f"gamma is {gamma}, but must be from {-GAMMA_LIMIT} to {GAMMA_LIMIT}")


WITH_ONSET = ("log-power", "llama4")


def check_length_onset(onset: int | None, norm: str) -> None:
    """Check the number of tokens from which on a length scale grows.

    Raises:
        InputError: `norm` has no such number, or it is out of range.
    """
    if onset is None:
        return
    if norm not in WITH_ONSET:
        raise InputError(f"norm {norm} has no length_onset; leave it out, or choose {' or '.join(WITH_ONSET)}")
    if not 1 <= onset <= MOST_SIZE:
        raise InputError(f"length_onset is {onset}, but must be from 1 to {MOST_SIZE} tokens")


@dataclass(frozen=True)
class SharpConfig:
    """A model's sizes, its attention scheme and its special tokens; checked when it is made.

    `causal` makes a decoder, otherwise it is an encoder. `alpha` 0 takes the norm's own. `gamma` fixes the
    exponent of the learned length scales, see `sharp.models.query_scale`. `temperature` divides q k
    under norm fixed-temperature and matters to no other. `trained_context` is the longest sequence seen in training,
    `max_context` the longest that the model may be served with. `rope_factor` and `rope_scaling` stretch RoPE, see
    `sharp.models.positions.inverse_frequency`; 1 leaves it as it is. `tokenizer` says what a token id stands for:
    `bytes` is `sharp.models.byte_tokenizer`, `none` leaves it open. `bos_token_id` is put before a text,
    `eos_token_ids` end it.

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
        for field in ("temperature_coefficients", "eos_token_ids"):  # JSON has lists
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for field in ("rope_theta", "rope_factor", "rms_norm_eps"):
            if type(value := getattr(self, field)) is int:  # torch takes none beyond 64 bits
                object.__setattr__(self, field, float(value))
        self._check()

    @property
    def scheme(self) -> Norm:
        """The registry's entry for `norm`."""
        return get_norm(self.norm)

    @property
    def scale(self) -> float:
        """The factor of the logits q k: head_dim^-0.5, over the temperature where it is fixed."""
        return float(self.head_dim**-0.5) / self.fixed_temperature

    @property
    def fixed_temperature(self) -> float:
        """What divides the logits under norm fixed-temperature; 1 under every other."""
        return self.temperature if self.norm == "fixed-temperature" else 1.0

    def _check(self) -> None:
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
