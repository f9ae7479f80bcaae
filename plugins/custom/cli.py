"""The command `sharp check-normalizer`."""

from pathlib import Path

import click

from sharp.core.cli import SharpCommand, status
from sharp.core.errors import VerificationError


@click.command(cls=SharpCommand, epilog="See also: sharp docs tutorials/own-normalizer, sharp export --norm.")
@click.argument("file", type=click.Path(path_type=Path))
def check_normalizer(file: Path) -> None:
    """Test the normalizer that a Python FILE defines: mask, huge logits, gradients, streaming, form in standard ops.

    FILE is run. The exit code is 1 if a check fails.
    """
    with status(f"Loading {file}"):
        from sharp.plugins.op.custom_normalizer import in_file

        custom = in_file(file)  # a file that is not there is refused before the import of torch
        from sharp.plugins.custom.checks import run_checks
    failed = 0
    for check in run_checks(custom):
        failed += bool(check.problem)
        mark = click.style("FAIL", fg="red") if check.problem else click.style("ok  ", fg="green")
        text = check.problem or check.note
        click.echo(f"{mark}  {check.name}" + (f": {text}" if text else ""))
    if failed:
        raise VerificationError(f"{custom.name} failed {failed} of its checks; correct {file} and run this again")
    click.echo(f"{custom.name} is ready: register it under the entry point sharp.normalizers, and export with --norm")
