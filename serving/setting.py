"""`Setting`: the metadata of a field in a configuration dataclass that users can set.

    max_sequences: Annotated[int, Setting("Maximum running sequences.", at_least=1)] = 64

The flag, the environment variable, the TOML key, `--help` and docs/reference/settings.md are all generated from it.
"""

from dataclasses import dataclass
from typing import Any, get_type_hints

from sharp.serving.api.errors import InputError


@dataclass(frozen=True)
class Setting:
    """A setting of `sharp-serve`. Its type and default are those of the field.

    Attributes:
        help: what the setting does.
        name: the name of the setting, if not the field's name.
        default: the default in words, if the field's value does not tell it.
        choices: all values that are allowed.
        at_least: the smallest allowed value.
        above: the exclusive lower limit.
        at_most: the largest allowed value.
        aliases: other flags with the same meaning, such as vLLM's names.
        limits: the limits in words, if an error is to name both limits or other words.
        group: the group of the help, if not that of the field's dataclass.
        common: whether `sharp serve -h` shows the setting.
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
        """Check a value. None is always allowed.

        Raises:
            InputError: the value is not one of the choices, or out of range.
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
    """Return the settings among the fields of a dataclass, by field name."""
    return {
        name: metadata
        for name, hint in get_type_hints(config, include_extras=True).items()
        for metadata in getattr(hint, "__metadata__", ())
        if isinstance(metadata, Setting)
    }


def check_settings(config: object) -> None:
    """Check the value of every setting of a configuration.

    Raises:
        InputError: a value is not allowed; the message names the first such setting.
    """
    for name, setting in settings_of(type(config)).items():
        setting.check(name, getattr(config, name))
