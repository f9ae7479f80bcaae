"""The options of a norm: from the user, else from the checkpoint, else the start values of the norm."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from sharp.core.errors import InputError
from sharp.core.manifest import Norm, NormParameter, NormValue
from sharp.models.config import WITH_ONSET, SharpConfig, check_length_onset
from sharp.models.norms import get_norm
from sharp.models.query_scale import LOG_LENGTH_OFFSET, QueryScale
from sharp.models.ssa_parameters import SSA_START, SsaParameters, SsaValues
from sharp.models.temperature_preset import AdaptiveTemperature, read_temperature
from sharp.plugins.op.schema import DEFAULT_ENTROPY_THRESHOLD
from sharp.plugins.op.torch_normalizers import DEFAULT_TEMPERATURE

# Option -> the norms that have this option.
OPTIONS = {
    "alpha": ("entmax", "sentmax", "asentmax"),
    "ssa-b": ("ssa",),
    "ssa-n": ("ssa",),
    "temperature": ("fixed-temperature",),
    "temperature-coefficients": ("adaptive-temperature",),
    "log-length-offset": ("ssmax", "ssmax-bias", "assmax", "sentmax", "asentmax"),
    "length-onset": WITH_ONSET,
}


MOST_ALPHA = 64.0  # the largest alpha of the ASEntmax paper, Table 5


def check_alpha(name: str, alpha: float) -> None:
    """Check that kernels can compute entmax with this `alpha`.

    Raises:
        InputError: `alpha` is out of range; the message calls it `name`.
    """
    if not 1 < alpha <= MOST_ALPHA:
        raise InputError(f"{name} is {alpha:g}, but must be above 1 and at most {MOST_ALPHA:g}")


@dataclass(frozen=True)
class NormOptions:
    """The options of a norm that the user gave; None where the checkpoint decides.

    `temperature_coefficients` may be the name or the file of a preset. `log_length_offset` is o in L = ln(i + o), where
    i is the 0-based position; learned length scales grow with L. `length_onset` is the number of tokens at which the
    scales of log-power and llama4 begin to grow.
    """

    alpha: float | None = None
    ssa_b: float | None = None
    ssa_n: float | None = None
    temperature: float | None = None
    temperature_coefficients: str | AdaptiveTemperature | None = None
    log_length_offset: int | None = None
    length_onset: int | None = None

    def check(self, norm: str) -> None:
        """Check the options for `norm`, except what `SharpConfig` checks.

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
        if self.ssa_n is not None and not 0 < self.ssa_n <= 1e6:
            raise InputError(f"--ssa-n is {self.ssa_n:g}, but must be above 0 and at most 1e6")
        check_length_onset(self.length_onset, norm)
        # With an offset of 1 the first token has L = 0, and 0^gamma is infinite for gamma < 0.
        least = 1 if norm.startswith("ssmax") else 2
        if self.log_length_offset is not None and not least <= self.log_length_offset <= 2**20:
            raise InputError(
                f"--log-length-offset is {self.log_length_offset}, but must be from {least} to {2**20} for {norm}"
            )

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of a `SharpConfig` that the user gave, by name, to be replaced in a configuration.

        Raises:
            NotFoundError: the preset of the temperature does not exist.
            InputError: the preset of the temperature is not valid.
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
        """Set the options that the user gave in the modules of `model` that hold a norm's parameters, in place.

        These options are b and n of ssa, the offset and the onset of length scales; `config_fields` has the others.
        """
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
    """Return the options that the user gave for the norm of an exported model, from its manifest."""
    given: dict[str, Any] = {
        parameter.name: parameter.value for parameter in norm.parameters if parameter.origin == "option"
    }
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
    """Return every parameter of the norm of `config`: its value, and whether option, checkpoint or default gave it.

    `trained` says that the checkpoint was trained with this norm. The value of a parameter that the checkpoint has
    learned is None, because it differs from head to head; so is the value of every length scale.

    Raises:
        NotFoundError: the preset of the temperature does not exist.
        InputError: the preset of the temperature is not valid.
    """
    given = options.config_fields()

    def field(name: str, default: NormValue) -> NormParameter:
        """Return the parameter of a config's field, with its origin: an option, the checkpoint or the default."""
        value: NormValue = getattr(config, name)
        stored = trained or value != default
        return NormParameter(
            name=name, value=value, origin="option" if name in given else "checkpoint" if stored else "default"
        )

    def learned(name: str, option: float | None, start: float | None) -> NormParameter:
        """Return a learned parameter: the user's `option`, else the checkpoint's (no single value), else `start`."""
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
