"""The way from `FILE.py:CLASS`, weights and arguments to the program that is exported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from sharp.core.errors import InputError, NotFoundError
from sharp.exporter.module import check_traced, evaluated, trace
from sharp.exporter.user_class.arguments import construct, parse_arguments
from sharp.exporter.user_class.reference import Reference, load, running
from sharp.exporter.user_class.weights import load_weights, read_weights

EXAMPLE_TOKENS = 8


@dataclass(frozen=True)
class ClassOptions:
    """The options of `sharp-export` for a user's own class.

    Attributes:
        weights: the file of the weights (`--weights`); None only for a function that returns a module with weights.
        weights_entry: the dotted path of the weights in that file; None finds it.
        arguments: the arguments of the class, each NAME=VALUE (`--arg`).
        config_class: the class of an object with all arguments, or `namespace` or `dict`; None finds it.
        example: the name of a function in the user's file that returns example inputs; None means token ids.
        ignored: names or patterns of weights that the module does not need (`--ignore-key`).
    """

    weights: Path | None = None
    weights_entry: str | None = None
    arguments: tuple[str, ...] = ()
    config_class: str | None = None
    example: str | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClassProgram:
    """The program of a module; `name` is that of its class."""

    program: ExportedProgram
    name: str


def program_of(reference: Reference, options: ClassOptions) -> ClassProgram:
    """Construct the module with its weights and trace it to a program.

    Raises:
        NotFoundError: the file of the weights does not exist.
        InputError: the user's code fails, arguments or weights do not fit, no weights are given for a class, or
            torch.export cannot trace the module.
    """
    given = parse_arguments(options.arguments)
    target, code = load(reference)
    if options.weights is not None and not options.weights.is_file():
        raise NotFoundError(f"the weights {options.weights} are no file; give a .safetensors or .pt file")
    if options.weights is None and isinstance(target, type):
        raise InputError(f"{reference} is a class, whose weights are in a file: name it with --weights FILE")
    weights = None if options.weights is None else read_weights(options.weights)
    stored = {} if weights is None else weights.arguments
    module = construct(reference, target, code, given, stored, options.config_class)
    if not isinstance(module, nn.Module):
        raise InputError(f"{reference} gives a {type(module).__name__}, but must give a torch.nn.Module")
    name = type(module).__name__
    with running(reference, f"loading the weights of {name}"):
        if weights is not None:
            load_weights(module, name, weights, options.weights_entry, options.ignored)
        module.float()
    inputs = _example(reference, code, options.example)
    try:
        with running(reference, f"calling {name}"), evaluated(module):
            program = trace(module, inputs)
            check_traced(module, program, inputs)
    except InputError as error:
        if options.example is not None:
            raise
        raise InputError(
            f"{error} (it was called with token ids [1, {EXAMPLE_TOKENS}]; for others name a function of the file that "
            "returns what it is called with: --example FUNCTION)"
        ) from error
    return ClassProgram(program, name)


def _example(reference: Reference, code: Any, name: str | None) -> Any:
    """Return the example inputs of the module: token ids int64 [1, 8], or what the user's function `name` returns.

    Raises:
        InputError: the user's code has no such function, or the function raised an error.
    """
    if name is None:
        return (torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.int64),)
    function = getattr(code, name, None)
    if not callable(function):
        raise InputError(f"--example is {name!r}, but must be a function in {reference.place}")
    with running(reference, f"{name}()"):
        return function()
