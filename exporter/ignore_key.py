"""The option `--ignore-key` of every command that reads a checkpoint."""

import click

ignore_key_option = click.option(
    "--ignore-key",
    "ignore_keys",
    multiple=True,
    metavar="KEY",
    help="A key of config.json or another file of the checkpoint, or a weight, that Sharp may ignore, because it does "
    "not change the model: a name, or a pattern such as 'mtp.*'; repeatable.",
)
