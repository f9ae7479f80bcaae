"""Every field of the settings of `sharp-export` and `sharp adapt` has an option with the same default."""

from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any

import click
import pytest

from sharp.exporter.adapt.cli import adapt
from sharp.exporter.adapt.settings import AdaptSettings
from sharp.exporter.cli import export
from sharp.exporter.export import ExportSettings
from sharp.exporter.graph.graph_options import GraphOptions
from sharp.exporter.sources.norm_options import NormOptions

NESTED = ("graph", "program", "norm_options")  # fields that hold a dataclass of their own


@pytest.mark.parametrize(
    ("command", "config"),
    [(export, ExportSettings), (export, GraphOptions), (export, NormOptions), (adapt, AdaptSettings)],
    ids=lambda one: getattr(one, "__name__", one.name if isinstance(one, click.Command) else None),
)
def test_every_field_has_an_option_with_the_same_default(command: click.Command, config: type) -> None:
    options = {parameter.name: parameter for parameter in command.params}
    for field in fields(config):
        if field.name not in NESTED:
            assert default_of(options[field.name]) == plain_default(field), field.name


def default_of(option: click.Parameter) -> Any:
    value = option.get_default(click.Context(click.Command("")))
    if isinstance(value, Enum):  # click's value for an absent default
        value = None
    return () if option.multiple and value is None else value


def plain_default(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default
