"""`Setting`: what stands beside a field of a configuration dataclass that users can set.

    max_sequences: Annotated[int, Setting("Most sequences that run together.", at_least=1)] = 64

The flag, the environment variable, the TOML key, `--help` and docs/reference/settings.md are all made from it.
"""

from dataclasses import dataclass
from typing import Any, get_type_hints

from sharp.serving.api.errors import InputError


@dataclass(frozen=True)
class Setting:
    """A setting of `sharp-serve`; its type and default are the field's.

    Attributes:
        help: what it does.
        name: of the setting, where it is not the field's name.
        default: the default in words, where the field's value does not say it.
        choices: all values that are allowed.
        at_least: smallest value.
        above: exclusive lower limit.
        at_most: largest value.
        aliases: other flags of the same meaning, as vLLM names them.
        limits: the limits in words, where they are not those above or an error is to name both.
        group: of the help, where it is not that of the field's dataclass.
        common: whether `sharp serve -h` shows it.
    """

    help: str
    name: str = ""
    default: str = ""
    choices: tuple[str, ...] = ()
    at_least: int | None = None
    above: float | None = None
    at_most: float | None = None
    limits: str = ""
    aliases: tuple[str, ...] = ()
    group: str = ""
    common: bool = False

    def check(self, name: str, value: Any) -> None:
        """Check a value; None is never out of range.

        Raises:
            InputError: the value is not a choice, or out of range.
        """
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise InputError(f"{name} is {value!r}; it must be one of: {', '.join(self.choices)}")
        for allowed, limit in (
            (self.at_least is None or value >= self.at_least, f"at least {self.at_least}"),
            (self.above is None or value > self.above, f"above {self.above}"),
            (self.at_most is None or value <= self.at_most, f"at most {self.at_most}"),
        ):
            if not allowed:
                raise InputError(f"{name} is {value}; it must be {self.limits or limit}")


def settings_of(config: type) -> dict[str, Setting]:
    """The settings among the fields of a dataclass, by the name of the field."""
    return {
        name: metadata
        for name, hint in get_type_hints(config, include_extras=True).items()
        for metadata in getattr(hint, "__metadata__", ())
        if isinstance(metadata, Setting)
    }


def check_settings(config: object) -> None:
    """Check the value of every setting of a configuration.

    Raises:
        InputError: the first one that is not allowed.
    """
    for name, setting in settings_of(type(config)).items():
        setting.check(name, getattr(config, name))
