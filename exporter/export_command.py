"""The work of the command `sharp-export`: progress, warnings, the report and the exit code."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from rich.console import Console

from sharp.core import hub
from sharp.core.cli import exit_on_terminate, if_interrupted
from sharp.core.errors import VerificationError
from sharp.exporter.checkpoints.path_checks import check_checkpoint
from sharp.exporter.phases import PhaseBar
from sharp.exporter.staging import check_output
from sharp.exporter.user_class.reference import Reference, parse_reference
from sharp.models.norms import get_norm

if TYPE_CHECKING:  # --help and usage errors must not wait for the import of torch and transformers, which takes seconds
    from sharp.core.manifest import CacheDtype, Dtype, Quantization, Target
    from sharp.exporter.export import Export, ExportSettings
    from sharp.exporter.plan import ExportPlan
    from sharp.exporter.sources.source import Source
    from sharp.exporter.user_class.build import ClassOptions


@dataclass(frozen=True)
class ExportFlags:
    """The flags of `sharp-export` as the user typed them, each under the name of its option in `exporter/cli.py`."""

    source: Path
    output: Path | None
    norm: str | None
    norm_map: Path | None
    trained_norm: Path | None
    untrained_norm: bool
    alpha: float | None
    ssa_b: float | None
    ssa_n: float | None
    temperature: float | None
    temperature_coefficients: str | None
    log_length_offset: int | None
    length_onset: int | None
    cache: str
    target: Target | None
    head: str | None
    ignore_keys: tuple[str, ...]
    sampling: tuple[str, ...]
    max_context: int | None
    block_size: int
    key_screen: Literal["auto", "int8", "none"]
    opset: int
    dtype: Dtype
    kv_dtype: CacheDtype | None
    quantize: Quantization | None
    tokenizer: str | None
    norm_parameters: tuple[str, ...]
    weights: Path | None
    weights_entry: str | None
    arguments: tuple[str, ...]
    config_class: str | None
    example: str | None
    text: Path | None
    as_json: bool
    quiet: bool
    dry_run: bool

    def settings(self) -> ExportSettings:
        """Return the settings of the export that the flags describe.

        Raises:
            click.UsageError: --norm-parameter is no NAME=VALUE.
        """
        from sharp.exporter.export import ExportSettings
        from sharp.exporter.graph.graph_options import GraphOptions
        from sharp.exporter.programs.reading import ProgramOptions
        from sharp.exporter.sources.norm_options import NormOptions

        return ExportSettings(
            norm=self.norm,
            cache=self.cache,
            target=self.target,
            norm_map=self.norm_map,
            trained_norm=self.trained_norm,
            head=self.head,
            ignore_keys=self.ignore_keys,
            sampling=self.sampling,
            untrained_norm=self.untrained_norm,
            text=self.text,
            norm_options=NormOptions(
                alpha=self.alpha,
                ssa_b=self.ssa_b,
                ssa_n=self.ssa_n,
                temperature=self.temperature,
                temperature_coefficients=self.temperature_coefficients,
                log_length_offset=self.log_length_offset,
                length_onset=self.length_onset,
            ),
            graph=GraphOptions(
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                quantize=self.quantize,
                block_size=self.block_size,
                max_context=self.max_context,
                opset=self.opset,
                key_screen=self.key_screen,
            ),
            program=ProgramOptions(
                tokenizer=self.tokenizer, norm_parameters=dict(map(parse_parameter, self.norm_parameters))
            ),
        )

    def class_options(self) -> ClassOptions:
        """Return the options for FILE.py:CLASS that the flags describe."""
        from sharp.exporter.user_class.build import ClassOptions

        return ClassOptions(
            self.weights, self.weights_entry, self.arguments, self.config_class, self.example, ignored=self.ignore_keys
        )

    def check_no_class(self) -> None:
        """Refuse flags for FILE.py:CLASS with a checkpoint of another kind.

        Raises:
            click.UsageError: such a flag is given.
        """
        given = {
            "--weights": self.weights,
            "--weights-entry": self.weights_entry,
            "--arg": self.arguments or None,
            "--config-class": self.config_class,
            "--example": self.example,
        }
        for option, value in given.items():
            if value is not None:
                raise click.UsageError(f"{option} is for FILE.py:CLASS, and SOURCE is {self.source}; leave it out")


def shares_of_time(flags: ExportFlags, reference: Reference | None) -> dict[str, float]:
    """Return the names of the phases of an export in their order, with about the share of its time that each takes."""
    shares = {"Loading PyTorch": 4.0} | ({} if reference is None else {f"Making {reference.name}": 2.0})
    shares["Reading the checkpoint"] = 4.0
    if flags.dry_run:
        return shares
    if flags.untrained_norm or flags.text or flags.quantize:
        shares["Measuring perplexity"] = 4.0
    shares |= {"Measuring keys": 1.0, "Tracing and lowering to ONNX": 8.0, "Writing the model": 2.0}
    shares["Verifying against PyTorch"] = 10.0
    if flags.quantize:
        shares |= {f"Quantizing to {flags.quantize}": 3.0, f"Verifying the {flags.quantize} model": 10.0}
    return shares


def run_export(flags: ExportFlags) -> None:
    """Export, or plan an export, by the flags of the command line; print the report.

    Raises:
        SharpError: the export is refused or fails, see `sharp.exporter.export.export`.
        click.UsageError: a flag is not for this kind of checkpoint.
        VerificationError: the model folder was written and is marked as unverified.
    """
    exit_on_terminate()
    if_interrupted("no model folder was written")
    reference = parse_reference(flags.source)
    if flags.norm is not None:
        get_norm(flags.norm)
    if flags.output is not None:
        check_output(flags.output)
    for parameter in flags.norm_parameters:
        parse_parameter(parameter)
    if reference is None:
        if hub.is_hub_id(str(flags.source)):
            flags = replace(flags, source=hub.download(str(flags.source)))
        check_checkpoint(flags.source)  # before the imports, which take seconds
        flags.check_no_class()
    console = Console(stderr=True, quiet=flags.quiet)
    with PhaseBar(console, time.monotonic(), shares_of_time(flags, reference)) as phase:
        progress = phase.progress

        def on_source(read: Source) -> None:
            """Print the warnings about the checkpoint."""
            if not read.trained:
                progress.console.print(untrained_warning(read))
            for warning in read.warnings:
                progress.console.print(f"Warning: {warning}", highlight=False, markup=False, soft_wrap=True)
            if (unused := unused_warning(read)) is not None:
                progress.console.print(unused, highlight=False, markup=False, soft_wrap=True)
            for note in tokenizer_notes(read):
                progress.console.print(note, markup=False, highlight=False, soft_wrap=True)

        from sharp.exporter.export import Export
        from sharp.exporter.export import dry_run as plan
        from sharp.exporter.export import export as run
        from sharp.exporter.programs.time_limit import time_of_program
        from sharp.exporter.report import tokenizer_notes, untrained_warning, unused_warning
        from sharp.exporter.user_class.build import program_of

        source, settings = flags.source, flags.settings()
        if reference is not None:
            phase(f"Making {reference.name}", 1)
            made = program_of(reference, flags.class_options())
            settings = replace(settings, program=replace(settings.program, exported=made.program, name=made.name))
            source = Path(made.name)
        with time_of_program(source):
            result = (plan if flags.dry_run else run)(source, settings, flags.output, phase, on_source)
    _print(flags, result)
    if isinstance(result, Export) and result.verification.failure is not None:
        raise VerificationError(
            f"{result.verification.failure}; {result.folder} is marked as unverified, and its report.json has the "
            "numbers"
        )


def _print(flags: ExportFlags, result: Export | ExportPlan) -> None:
    """Print the report of an export or of its plan, in the form that the flags ask for."""
    from sharp.core.manifest import NormParameter
    from sharp.exporter.plan import ExportPlan
    from sharp.exporter.report import report, report_plan

    if flags.as_json:
        content = asdict(result) if isinstance(result, ExportPlan) else result.report
        click.echo(json.dumps(content, indent=2, default=NormParameter.model_dump))
    elif flags.quiet:
        return
    elif isinstance(result, ExportPlan):
        report_plan(result)
    else:
        report(result)


def parse_parameter(text: str) -> tuple[str, float | str]:
    """Split a value of `--norm-parameter` into the parameter's name, and a number or the name of a tensor.

    Raises:
        click.UsageError: the text is not NAME=VALUE.
    """
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise click.UsageError(f"--norm-parameter is {text!r}, but must be NAME=TENSOR or NAME=NUMBER")
    try:
        return name, float(value)
    except ValueError:
        return name, value
