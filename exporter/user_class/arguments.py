"""The arguments that a user's class is constructed with, from `--arg` or from a trainer's checkpoint."""

import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from sharp.core.errors import InputError
from sharp.exporter.sources.unknown_keys import matches
from sharp.exporter.user_class.recorded import RecordedDict, RecordedNamespace
from sharp.exporter.user_class.reference import Reference, callables_of, running

# Entries of a checkpoint in which trainers store the arguments of a model.
ENTRIES = (
    *("model_args", "model_config", "config", "hyper_parameters", "hparams", "args", "init_args", "model_kwargs"),
    *("kwargs", "model_cfg", "cfg", "model_hparams"),
)
# Names in these entries that are settings of the training, unless the model's class has a parameter of that name.
OF_TRAINING = (
    *(
        "*dropout",
        "*dropouts",
        "*dropout_*",
        "lr",
        "lr_*",
        "*_lr",
        "*learning_rate*",
        "*weight_decay*",
        "beta1",
        "beta2",
    ),
    *("betas", "*optim*", "*sched*", "*warmup*", "max_iters", "eval_iters", "max_steps", "total_steps", "eval_steps"),
    *("save_steps", "logging_steps", "num_train_steps", "*accumulation_steps", "*epoch*", "*batch_size*", "grad_*"),
    *("gradient_*", "clip_grad*", "*seed", "device", "devices", "dtype", "precision", "compile", "backend", "strategy"),
    *(
        "accelerator",
        "num_nodes",
        "num_workers",
        "wandb*",
        "use_wandb",
        "logger",
        "logging*",
        "log_interval",
        "log_every*",
    ),
    *("eval_*", "val_split", "val_fraction", "val_check_interval", "*_interval", "out_dir", "*_dir", "*_path"),
    *("data", "dataset*", "data_*", "init_from", "always_save_checkpoint", "ckpt*", "checkpoint*", "resume*"),
    *("decay_lr", "label_smoothing", "loss", "*_loss", "run_name", "debug", "iter_num", "step", "*_step", "format"),
    *("*_version", "*version", "name", "*_name", "time", "date", "author", "license"),
)
CONFIG_NAMES = ("config", "cfg", "conf", "args", "hparams", "hps", "params", "options", "opt")
LITERALS = {"True": True, "False": False, "None": None}
PLAIN = (int, float, bool, str)
Named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class Signature:
    """The parameters of a class or function.

    Attributes:
        name: the name of the class or function.
        types: the annotations of its named parameters.
        defaults: the defaults of the parameters that have one.
        open: whether it takes keyword arguments of any name.
    """

    name: str
    types: Mapping[str, Any]
    defaults: Mapping[str, Any]
    open: bool

    @property
    def required(self) -> list[str]:
        """The names of the parameters without a default."""
        return [name for name in self.types if name not in self.defaults]

    def own(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are named parameters of the class or function, in their order."""
        return [name for name in names if name in self.types]

    def others(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are neither parameters nor settings of a training, such as learning_rate."""
        return [name for name in names if name not in self.types and not matches(name, OF_TRAINING)]

    def takes(self, names: Iterable[str]) -> bool:
        """Whether some of the names are parameters and all others are settings of a training."""
        return bool(self.own(names)) and not self.others(names)


def signature_of(target: Callable[..., Any]) -> Signature:
    """Read the signature of a class or function.

    Raises:
        InputError: `target` has no signature, as some classes that are written in C.
    """
    name = getattr(target, "__name__", type(target).__name__)
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} does not say which arguments it takes; write a function that makes it") from error
    of = target.__init__ if inspect.isclass(target) else target
    try:
        hints = typing.get_type_hints(of)
    except Exception:  # annotations are code of the user, so evaluating them may raise anything
        hints = {}
    named = [parameter for parameter in parameters if parameter.kind in Named]
    return Signature(
        name,
        {parameter.name: hints.get(parameter.name, Any) for parameter in named},
        {parameter.name: parameter.default for parameter in named if parameter.default is not parameter.empty},
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
    )


def parse_arguments(given: Sequence[str]) -> dict[str, str]:
    """Split the values of `--arg`, NAME=VALUE, into a dictionary.

    Raises:
        InputError: an argument has no name or no =, or is given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--arg is {text!r}, but must be NAME=VALUE")
        if name in found:
            raise InputError(f"--arg {name} is given twice; give it once")
        found[name] = value
    return found


def construct(
    reference: Reference,
    target: Callable[..., Any],
    module: ModuleType,
    given: Mapping[str, str],
    stored: Mapping[str, Mapping[str, Any]],
    config_class: str | None,
) -> Any:
    """Construct the module with the arguments in `given`, and those in `stored`, the entries of the checkpoint.

    If the class takes one object with all settings, such as nanoGPT's `config`, the object is of `config_class`, or of
    the dataclass that the parameter is annotated with, or of the dataclass in the file.

    Args:
        reference: the class or function in the user's code.
        target: the class or function itself.
        module: its module, in which the class of the settings is looked up.
        given: the values of `--arg` by name, as text.
        stored: dictionaries of arguments in the weights file, by the dotted path of their entry.
        config_class: the name of a class in `module`, `namespace` or `dict`; None finds the class.

    Returns:
        What `target` returns, which is not checked.

    Raises:
        InputError: arguments are missing or unknown or of another type, or a stored setting is not read by the class,
            or the user's class raised an error.
    """
    own = signature_of(target)
    at = _config_parameter(own, given, stored, config_class)
    if at is None:
        _check_in_code(own, target, reference, given)
        arguments = _arguments(own, given, stored)
    else:
        maker = _config_maker(own, at, module, config_class)
        direct = {name: value for name, value in given.items() if name in own.types}
        others = {name: value for name, value in given.items() if name not in own.types}
        if maker in (dict, SimpleNamespace):
            first = next((dict(stored[name]) for name in ENTRIES if name in stored), {})
            values = {**first, **{name: _value(text, Any) for name, text in others.items()}}
            maker = RecordedNamespace if maker is SimpleNamespace else RecordedDict
        else:
            values = _arguments(signature_of(maker), others, stored)
        with running(reference, f"{getattr(maker, '__name__', at)}(...)"):
            config = maker(**values)
        arguments = {at: config, **_arguments(own, direct, {}, but=at)}
    with running(reference, f"{own.name}(...)"):
        made = target(**arguments)
    for config in arguments.values():
        if isinstance(config, RecordedNamespace | RecordedDict) and config.read:
            unread = [name for name in config.names if name not in config.read and not matches(name, OF_TRAINING)]
            if unread:
                raise InputError(
                    f"the settings have {unread[0]}, which {own.name} does not read; is it the class that was trained? "
                    f"If so, give the settings that it reads with --arg: {', '.join(sorted(config.read))}"
                )
    return made


def _check_in_code(own: Signature, target: Callable[..., Any], reference: Reference, given: Iterable[str]) -> None:
    """Refuse an argument whose name is nowhere in the user's code, if the class takes arguments of any name.

    Python passes such an argument to `**kwargs`, where nobody would notice a misspelled name.

    Raises:
        InputError: there is such an argument.
    """
    others = [name for name in given if name not in own.types]
    if not (own.open and others):
        return
    top = (getattr(target, "__module__", None) or "").partition(".")[0]
    files = {
        Path(file)
        for name, module in [*sys.modules.items()]
        if (file := getattr(module, "__file__", None))
        and file.endswith(".py")
        and (name.partition(".")[0] == top or Path(file).parent.is_relative_to(reference.folder))
    }
    code = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
    for name in others:
        if not re.search(rf"\b{name}\b", code):
            raise InputError(
                f"{own.name} takes arguments of any name, but its code has no name {name}; correct --arg {name}=VALUE"
            )


def _config_parameter(
    own: Signature, given: Mapping[str, str], stored: Mapping[str, Mapping[str, Any]], config_class: str | None
) -> str | None:
    """Return the parameter that takes one object with all settings; None if each setting is a parameter.

    Raises:
        InputError: `config_class` is given, but the class takes no argument.
    """
    if config_class is not None:
        if not own.types:
            raise InputError(f"{own.name} takes no argument; leave --config-class out")
        return next(iter(own.required or own.types))
    for name, kind in own.types.items():
        if is_dataclass(kind) or is_dataclass(own.defaults.get(name)):
            return name
    fits = any(own.takes(entry) for entry in stored.values()) or own.takes(given)
    if len(own.required) != 1 or fits:
        return None
    name = own.required[0]
    kind = own.types[name]
    of_a_class = inspect.isclass(kind) and kind.__module__.partition(".")[0] not in ("builtins", "torch", "typing")
    return name if of_a_class or (kind in (Any, dict) and name in CONFIG_NAMES) else None


def _config_maker(own: Signature, at: str, module: ModuleType, config_class: str | None) -> Callable[..., Any]:
    """Return the callable that makes the config argument `at` of the user's class from named values.

    `config_class` is the user's choice: a class in the file, "namespace" or "dict"; None goes by annotation and
    default.

    Raises:
        InputError: the class is not in the file, or cannot be found out.
    """
    if config_class == "namespace":
        return SimpleNamespace
    if config_class is not None:
        maker = dict if config_class == "dict" else getattr(module, config_class, None)
        if not callable(maker):
            raise InputError(
                f"--config-class is {config_class!r}, but must be a class in the file, or namespace, or dict"
            )
        return maker
    kind, default = own.types[at], own.defaults.get(at)
    if kind is dict:
        return dict
    if inspect.isclass(kind) and kind is not Any:
        return kind
    if is_dataclass(default) and not isinstance(default, type):
        return type(default)
    classes: dict[str, Any] = {name: found for name, found in callables_of(module).items() if is_dataclass(found)}
    alone: Callable[..., Any] | None = next(iter(classes.values())) if len(classes) == 1 else None
    known: Callable[..., Any] | None = classes.get(f"{own.name}Config", alone)
    if known is None:
        offered = f" ({', '.join(classes)}, say)" if classes else ""
        raise InputError(
            f"{own.name} takes {at}, and nothing says of which class it is: name the class in the file{offered} with "
            "--config-class CLASS; --config-class namespace makes it a types.SimpleNamespace, dict a dictionary"
        )
    return known


def _arguments(
    of: Signature, given: Mapping[str, str], stored: Mapping[str, Mapping[str, Any]], but: str | None = None
) -> dict[str, Any]:
    """Return the arguments for a signature, from `given` and `stored`; the caller has the argument `but` already.

    Raises:
        InputError: an argument is unknown, missing or of another type, or the stored entries contradict each other.
    """
    unknown = [name for name in given if name not in of.types and not of.open]
    if unknown:
        takes = f"it takes {', '.join(of.types)}" if of.types else "it takes none"
        raise InputError(f"{of.name} takes no argument {unknown[0]}; {takes}")
    fitting = _fitting(of, given, stored, but)
    values = {name: _value(text, of.types.get(name, Any), of.defaults.get(name), name) for name, text in given.items()}
    found = {**fitting, **values}
    missing = [name for name in of.required if name not in found and name != but]
    if missing:
        also = ""
        for entry, content in stored.items():
            if entry in ENTRIES and (others := of.others(content)):
                also = f"; the entry {entry} of the weights has also {others[0]}, which {of.name} does not take"
        each = " ".join(f"--arg {name}=VALUE" for name in missing)
        raise InputError(f"{of.name} needs {', '.join(missing)}, which nothing says: give {each}{also}")
    return found


def _fitting(
    of: Signature, given: Mapping[str, str], stored: Mapping[str, Mapping[str, Any]], but: str | None
) -> dict[str, Any]:
    """Return the arguments in the stored entry that fits the signature.

    Arguments of the class in a file are either taken or refused. If one were ignored, the class would use its default,
    and the model would compute something else. The result is empty if no entry has arguments of the class.

    Raises:
        InputError: an entry has arguments of the class and others, or two entries have different values of one.
    """
    found: dict[str, Any] = {}
    place = ""
    for entry, content in stored.items():
        whole = of.open and entry in ENTRIES  # a class that takes any argument gets all settings but the training's
        taken = [*of.own(content), *of.others(content)] if whole else of.own(content)
        own = {name: content[name] for name in taken if name not in given and name != but}
        others = [] if whole else of.others(content)
        if own and others and not found:
            each = " ".join(f"--arg {name}={value}" for name, value in own.items())
            raise InputError(
                f"the entry {entry} of the weights has {others[0]}, which {of.name} does not take, beside arguments "
                f"that it takes: say which are its own, with {each}"
            )
        for name, value in own.items():
            if found.get(name, value) != value:
                raise InputError(
                    f"the weights have {name} {found[name]!r} in {place} and {value!r} in {entry}; say which with "
                    f"--arg {name}=VALUE"
                )
        if own and not others:
            found, place = {**own, **found}, place or entry
        if entry in ENTRIES and others and not own and not found and not given and of.types and not of.open:
            raise InputError(
                f"the entry {entry} of the weights has {', '.join(others[:4])}, and {of.name} takes "
                f"{', '.join(of.types)}: say its arguments with --arg NAME=VALUE"
            )
    return found


def _value(text: str, kind: Any, default: Any = None, name: str = "") -> Any:
    """Return the value of NAME=VALUE: JSON, True, False or None, or else text.

    Raises:
        InputError: the value is not of the type `kind`, with which the class annotates its parameter.
    """
    kinds = typing.get_args(kind) or (kind,)  # int | None has two types
    if str in kinds or isinstance(default, str):
        return text
    try:
        value = LITERALS[text] if text in LITERALS else json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if float in kinds and type(value) is int:
        return float(value)
    plain = [each for each in kinds if each in PLAIN]
    if plain and len(plain) == len([each for each in kinds if each is not type(None)]) and type(value) not in kinds:
        expected = " or ".join(each.__name__ for each in plain)
        raise InputError(f"--arg {name} is {text!r}, but must be of type {expected}")
    return value
