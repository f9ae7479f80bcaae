"""The settings of `sharp-serve` from their sources: flags first, then the environment, then a TOML file.

A setting has one name: `grpc_port` in the file, `SHARP_GRPC_PORT` in the environment, `--grpc-port` as a flag. The name
is stated once, as a field with a `Setting` in `sharp.serving.config`.
"""

import logging
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from sharp.core.model_cache import CACHE_VARIABLE
from sharp.core.regular_file import read_regular_file
from sharp.serving.api.errors import InputError
from sharp.serving.api_config import ApiConfig
from sharp.serving.config import BackendConfig, EngineConfig, MetricsConfig, ServerConfig, Settings, TlsConfig
from sharp.serving.encoder_config import EncoderConfig
from sharp.serving.setting import Setting, settings_of

logger = logging.getLogger(__name__)

PREFIX = "SHARP_"
MOST_BYTES = 2**20  # of a file of settings
CONFIG_VARIABLE = "SHARP_CONFIG"
# The types of pydantic's errors int_parsing, int_type, bool_parsing, ..., as users say them.
KINDS = {"int": "a whole number", "int_from": "a whole number", "float": "a number", "bool": "true or false"}
KINDS |= {"string": "text", "path": "a path"}
# Variables that are no settings: this file's own, and those of the cache, of clients and of the kernel library.
OTHER_VARIABLES = {CONFIG_VARIABLE, CACHE_VARIABLE, "SHARP_TOKEN", "SHARP_LIBRARY_FOLDER", "SHARP_ISA"}
# The components of the configuration, and the group of their settings in the help, unless a setting names another.
COMPONENTS = {
    ServerConfig: "Network",
    TlsConfig: "Security",
    ApiConfig: "API",
    BackendConfig: "Model",
    EngineConfig: "Scheduling",
    EncoderConfig: "Encoders",
    MetricsConfig: "Observability",
}
GROUPS = ("Model", "Network", "Security", "API", "Memory", "Scheduling", "Limits", "Encoders", "Observability")


@dataclass(frozen=True)
class ServerSetting:
    """A setting of `sharp-serve`: the dataclass field that it fills, and its names as flag, variable and TOML key.

    `component` is the dataclass, `annotation` the field's type, `metadata` the description.
    """

    component: type
    field: Field[Any]
    annotation: Any
    metadata: Setting

    @property
    def name(self) -> str:
        """The name of the setting in a TOML file."""
        return self.metadata.name or self.field.name

    @property
    def group(self) -> str:
        """The group of the setting in the help."""
        return self.metadata.group or COMPONENTS[self.component]

    @property
    def flag(self) -> str:
        """The flag of the setting on the command line, such as --grpc-port."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable of the setting, such as SHARP_GRPC_PORT."""
        return PREFIX + self.name.upper()

    @property
    def type(self) -> Any:
        """The type of the value: bool, int, float, str or Path."""
        plain = get_args(self.annotation)[0]  # of Annotated[X, ...]
        return next((kind for kind in get_args(plain) if kind is not NoneType), plain)  # of X | None

    @property
    def default_text(self) -> str:
        """The default as users read it; empty if there is none."""
        default = self.field.default
        if self.metadata.default or default is None or default is MISSING:
            return self.metadata.default
        return ("off", "on")[default] if self.type is bool else str(default)


def _settings_of(component: type) -> Iterator[ServerSetting]:
    """Yield the settings of a component's dataclass."""
    settings, hints = settings_of(component), get_type_hints(component, include_extras=True)
    for field in fields(component):
        if field.name in settings:
            yield ServerSetting(component, field, hints[field.name], settings[field.name])


SERVER_SETTINGS = tuple(setting for component in COMPONENTS for setting in _settings_of(component))
KNOWN_VARIABLES = {*OTHER_VARIABLES, *(setting.variable for setting in SERVER_SETTINGS)}


class _Checks(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _tls_is_complete(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Check that certificate and key are given together, else raise ValueError."""
        cert, key, client_ca = (values.get(name) for name in ("tls_cert", "tls_key", "tls_client_ca"))
        if (cert is None) != (key is None):
            raise ValueError("TLS needs both tls_cert and tls_key")
        if client_ca is not None and cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key too")
        return values


def _model_field(setting: ServerSetting) -> Any:
    """Return type and default for pydantic, which converts strings of the environment and values of TOML."""
    field = setting.field
    if field.default_factory is not MISSING:
        return setting.annotation, FieldInfo(default_factory=field.default_factory)
    if field.default is MISSING:  # required in TlsConfig, which is optional as a whole
        return setting.annotation | None, None
    return setting.annotation, field.default


_MODEL_FIELDS: dict[str, Any] = {setting.name: _model_field(setting) for setting in SERVER_SETTINGS}
ServeSettings = create_model("ServeSettings", __base__=_Checks, **_MODEL_FIELDS)


def read_settings(flags: Mapping[str, Any], config: Path | None) -> Settings:
    """Return the settings of a server from the flags that were given, the environment and the file `config`.

    Raises:
        InputError: the file does not exist or is not TOML, a name is not known, or a value cannot be used; the message
            says where.
        OSError: the file cannot be read.
    """
    in_file, in_environment = _read_file(config), _read_environment()
    values = {**in_file, **in_environment, **flags}

    def source(name: str) -> str:
        """Return where the value of a setting comes from, as the end of a message; empty for a flag."""
        if name in flags or name not in values:
            return ""
        return f" (variable {PREFIX}{name.upper()})" if name in in_environment else f" (in {config})"

    try:
        return _configuration(ServeSettings(**values))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = f"there is no such setting; {_meant(name, _MODEL_FIELDS)}sharp-serve --help=all lists them"
        elif (kind := KINDS.get(first["type"].rpartition("_")[0])) is not None:
            raise InputError(f"{name} is {values[name]!r}; it must be {kind}{source(name)}") from error
        raise InputError(f"{name}: {message}{source(name)}" if name else message) from error
    except InputError as error:  # begins with the setting's name, see `sharp.serving.setting.Setting.check`
        raise InputError(f"{error}{source(str(error).partition(' ')[0])}") from error


def _meant(name: str, names: Iterable[str]) -> str:
    """Return a question with the one of `names` that is close to a wrong name; empty if none is."""
    close = get_close_matches(name, names, 1)
    return f"did you mean {close[0]}? " if close else ""


def _read_file(config: Path | None) -> dict[str, Any]:
    """Return the content of a TOML file; empty for None. InputError if it is missing or no TOML."""
    if config is None:
        return {}
    if not config.is_file():
        raise InputError(f"the configuration {config} does not exist; correct --config")
    try:
        return tomllib.loads(read_regular_file(config, MOST_BYTES).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{config} is not TOML: {error}; correct it") from error


def _read_environment() -> dict[str, str]:
    """Return the settings in the environment by name; unknown variables with our prefix are logged."""
    names = {setting.variable: setting.name for setting in SERVER_SETTINGS}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in KNOWN_VARIABLES:
            meant = _meant(variable, names)
            logger.warning("%s is no setting of sharp-serve; %ssharp-serve --help=all lists them", variable, meant)
    return {names[variable.upper()]: value for variable, value in os.environ.items() if variable.upper() in names}


def _configuration(values: BaseModel) -> Settings:
    """Return checked values as the dataclasses of the components."""

    def component(kind: type) -> Any:
        """Return the dataclass `kind` with its settings' values."""
        return kind(
            **{
                setting.field.name: getattr(values, setting.name)
                for setting in SERVER_SETTINGS
                if setting.component is kind
            }
        )

    server: ServerConfig = component(ServerConfig)
    if "tls_cert" in values.model_dump(exclude_none=True):
        server = replace(server, tls=component(TlsConfig))
    others = (component(kind) for kind in (EngineConfig, MetricsConfig, BackendConfig, ApiConfig, EncoderConfig))
    return Settings(server, *others)
