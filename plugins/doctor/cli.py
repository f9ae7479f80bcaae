"""The command `sharp doctor`."""

import json
from pathlib import Path

import click

from sharp.core.cli import FailedVerification, SharpCommand, status
from sharp.core.errors import InputError


@click.command(cls=SharpCommand, epilog="See also: sharp docs how-to/gpu, sharp docs verification.")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every number.")
def doctor(folder: Path | None, as_json: bool) -> None:
    """Show the hardware and backends of this machine, and check attention on every backend; or check a model FOLDER.

    With FOLDER, its files are compared with the SHA-256 sums that the export wrote. The exit code is 1 if one differs.

    A small random case of every kind of normalizer is compared with the float64 reference. On a GPU, ONNX Runtime runs
    the compiled kernels, Triton compiles them anew, and TensorRT builds and runs a small engine. The exit code is 1
    where a result differs or a backend fails; a missing backend is no failure.
    """
    if folder is not None:
        _check_folder(folder, as_json)
        return
    with status("Looking at this machine") as shown:
        from sharp.plugins.doctor import diagnosis  # numpy, ONNX Runtime and what backends need: not for --help

        machine, found = diagnosis.describe(), []
        for backend in diagnosis.backends():
            shown.update(f"Checking {backend.name}")
            found.append(diagnosis.diagnose(backend))
    if as_json:
        click.echo(
            json.dumps(
                {"machine": machine, "backends": [diagnosis.as_json(diagnosed) for diagnosed in found]}, indent=1
            )
        )
    else:
        diagnosis.print_diagnoses(machine, found)
    wrong = [diagnosed for diagnosed in found if diagnosed.status in ("differs", "failed")]
    for diagnosed in wrong:
        if "SHARP_ISA is" in diagnosed.reason:
            raise InputError(diagnosed.reason[diagnosed.reason.index("SHARP_ISA") :])
    if wrong:
        names = "; ".join(diagnosed.name for diagnosed in wrong)
        raise FailedVerification(
            f"{names}: wrong here. Please open an issue with the output of `sharp doctor --json` and of `pip freeze`. "
            "The former holds versions, where Sharp's libraries lie, this machine's processor and GPU, and the errors"
        )


def _check_folder(folder: Path, as_json: bool) -> None:
    """Compare the files of an exported folder with its checksums, and print the result as text or JSON.

    Raises:
        FailedVerification: files are damaged or missing.
    """
    from sharp.core.checksums import damaged_files

    with status(f"Reading {folder}"):
        damaged = damaged_files(folder)
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "damaged": damaged}, indent=1))
    if damaged:
        raise FailedVerification("; ".join(damaged) + "; copy or export the model again")
    if not as_json:
        click.echo(f"{folder}: all files are as they were exported")
