"""The command `sharp cache`."""

from datetime import datetime

import click

from sharp.core.cli import SharpCommand, SharpGroup
from sharp.core.model_cache import CACHE_VARIABLE, cache_folder, cached_models, remove_models


@click.group(
    cls=SharpGroup, invoke_without_command=True, epilog="See also: sharp docs serving, sharp serve, sharp run."
)
@click.pass_context
def cache(context: click.Context) -> None:
    """List the models that sharp serve and sharp run have exported on first use, the last used first."""
    if context.invoked_subcommand is not None:
        return
    models = cached_models()
    for model in models:
        used = datetime.fromtimestamp(model.used).astimezone().strftime("%Y-%m-%d %H:%M")
        options = f" {model.options}" if model.options else ""
        click.echo(f"{model.name}  {model.bytes / 2**20:,.0f} MB  used {used}  {model.source}{options}")
    total = sum(model.bytes for model in models)
    click.echo(f"{len(models)} models, {total / 2**20:,.0f} MB in {cache_folder()} ({CACHE_VARIABLE} chooses another)")


@cache.command(cls=SharpCommand)
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--all", "everything", is_flag=True, help="Remove all models.")
def remove(names: tuple[str, ...], everything: bool) -> None:
    """Remove models from the cache, by the names that sharp cache lists."""
    if everything == bool(names):
        raise click.UsageError("give the names of models, or --all")
    chosen = [model.name for model in cached_models()] if everything else list(names)
    remove_models(chosen)
    click.echo(f"Removed {len(chosen)} {'model' if len(chosen) == 1 else 'models'}.")
