"""What a norm is set up with: by the checkpoint, unless the user gave it, and else by the norm's own start values."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from sharp.models.config import WITH_ONSET, SharpConfig, check_length_onset
from sharp.models.norms import SSA_START, SsaParameters, SsaValues, get_norm
from sharp.models.query_scale import LOG_LENGTH_OFFSET, QueryScale
from sharp.models.temperature_preset import AdaptiveTemperature, read_temperature
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import Norm, NormParameter, NormValue
from sharp.plugins.ops.schema import DEFAULT_ENTROPY_THRESHOLD
from sharp.plugins.ops.torch_normalizers import DEFAULT_TEMPERATURE

# Option -> the norms that it is for.
OPTIONS = {
    "alpha": ("entmax", "sentmax", "asentmax"),
    "ssa-b": ("ssa",),
    "ssa-n": ("ssa",),
    "temperature": ("fixed-temperature",),
    "temperature-coefficients": ("adaptive-temperature",),
    "log-length-offset": ("ssmax", "ssmax-bias", "assmax", "sentmax", "asentmax"),
    "length-onset": WITH_ONSET,
}


MOST_ALPHA = 64.0  # of the ASEntmax paper, Table 5


def check_alpha(name: str, alpha: float) -> None:
    """Raises InputError if no kernel can compute with entmax's `alpha`."""
    if not 1 < alpha <= MOST_ALPHA:
        raise InputError(f"{name} is {alpha:g}, but must be above 1 and at most {MOST_ALPHA:g}")


@dataclass(frozen=True)
class NormOptions:
    """What the user gave; None where the checkpoint decides. `temperature_coefficients` may be a preset's name or file.

    `log_length_offset` is o in the L = ln(i + o) that learned length scales grow with, i the 0-based position;
    `length_onset` the tokens from which on log-power and llama4 grow.
    """

    alpha: float | None = None
    ssa_b: float | None = None
    ssa_n: float | None = None
    temperature: float | None = None
    temperature_coefficients: str | AdaptiveTemperature | None = None
    log_length_offset: int | None = None
    length_onset: int | None = None

    def check(self, norm: str) -> None:
        """Check the options for `norm`; what `SharpConfig` checks too is left to it.

        Raises:
            InputError: the norm is unknown, an option is not for it, or a value cannot work.
        """
        get_norm(norm)
        for option, norms in OPTIONS.items():
            if getattr(self, option.replace("-", "_")) is not None and norm not in norms:
                kinds = f"norm {norms[0]}" if len(norms) == 1 else f"the norms {', '.join(norms)}"
                raise InputError(f"--{option} is for {kinds}, not for {norm}; leave it out")
        if self.alpha is not None:
            check_alpha("--alpha", self.alpha)
        if self.ssa_b is not None and not 0 < self.ssa_b <= 1e6:
            raise InputError(f"--ssa-b is {self.ssa_b:g}, but must be above 0 and at most 1e6")
        if self.ssa_n is not None and not 1 <= self.ssa_n <= 1e6:
            raise InputError(f"--ssa-n is {self.ssa_n:g}, but must be from 1 to 1e6")
        check_length_onset(self.length_onset, norm)
        # With an offset of 1 the first token has L = 0, and 0^gamma is infinite for gamma < 0.
        least = 1 if norm.startswith("ssmax") else 2
        if self.log_length_offset is not None and not least <= self.log_length_offset <= 2**20:
            raise InputError(
                f"--log-length-offset is {self.log_length_offset}, but must be from {least} to {2**20} for {norm}"
            )

    def config_fields(self) -> dict[str, Any]:
        """The fields of a model's configuration that are given.

        Raises:
            NotFoundError, InputError: see `read_temperature`.
        """
        fields: dict[str, Any] = {}
        if self.alpha is not None:
            fields["alpha"] = self.alpha
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.temperature_coefficients is not None:
            chosen = self.temperature_coefficients
            preset = read_temperature(chosen) if isinstance(chosen, str) else chosen
            fields["temperature_coefficients"] = preset.coefficients
            fields["entropy_threshold"] = preset.entropy_threshold
        return fields

    def apply(self, model: nn.Module) -> None:
        """Set what is given in the modules of `model` that hold a norm's parameters."""
        for module in model.modules():
            if isinstance(module, SsaParameters | SsaValues):
                module.fill(self.ssa_b, self.ssa_n)
            elif isinstance(module, QueryScale):
                if self.log_length_offset is not None:
                    module.log_length_offset = self.log_length_offset
                if self.length_onset is not None:
                    module.onset = self.length_onset


NO_OPTIONS = NormOptions()


def options_of(norm: Norm) -> NormOptions:
    """What the user gave for the norm of an exported model."""
    given: dict[str, Any] = {one.name: one.value for one in norm.parameters if one.origin == "option"}
    if "temperature_coefficients" in given:
        given["temperature_coefficients"] = AdaptiveTemperature(norm.temperature_coefficients, norm.entropy_threshold)
    return NormOptions(
        alpha=given.get("alpha"),
        ssa_b=given.get("b"),
        ssa_n=given.get("n"),
        temperature=given.get("temperature"),
        temperature_coefficients=given.get("temperature_coefficients"),
        log_length_offset=given.get("log_length_offset"),
        length_onset=given.get("length_onset"),
    )


def norm_parameters(config: SharpConfig, options: NormOptions, trained: bool) -> tuple[NormParameter, ...]:
    """Every parameter of the norm of `config`: its value, and where it was taken from.

    `trained` says that the checkpoint was trained with this norm. What is learned in every head has no one value.
    """
    given = options.config_fields()

    def field(name: str, default: NormValue) -> NormParameter:
        value: NormValue = getattr(config, name)
        stored = trained or value != default
        return NormParameter(
            name=name, value=value, origin="option" if name in given else "checkpoint" if stored else "default"
        )

    def learned(name: str, option: float | None, start: float | None) -> NormParameter:
        if option is not None:
            return NormParameter(name=name, value=option, origin="option")
        return NormParameter(name=name, value=None if trained else start, origin="checkpoint" if trained else "default")

    found: list[NormParameter] = []
    norm = config.norm
    if config.scheme.normalizer == "entmax":
        found.append(field("alpha", config.scheme.alpha))
    if norm == "fixed-temperature":
        found.append(field("temperature", 1.0))
    if norm == "adaptive-temperature":
        found.append(field("temperature_coefficients", DEFAULT_TEMPERATURE))
        found.append(field("entropy_threshold", DEFAULT_ENTROPY_THRESHOLD))
    if norm == "ssa":
        found += [learned("b", options.ssa_b, SSA_START[0]), learned("n", options.ssa_n, SSA_START[1])]
    if config.scheme.scale_kind != "none":
        found.append(learned("length scale", None, None))
    if norm in WITH_ONSET:
        found.append(learned("length_onset", options.length_onset, config.trained_context))
    if norm in OPTIONS["log-length-offset"]:
        given_offset = options.log_length_offset
        found.append(
            NormParameter(
                name="log_length_offset",
                value=LOG_LENGTH_OFFSET if given_offset is None else given_offset,
                origin="default" if given_offset is None else "option",
            )
        )
    return tuple(found)
