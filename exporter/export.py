"""`sharp-export`, step by step: read, lower, write, verify, then show the folder whole or not at all."""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.mapped_decoder import MappedDecoder, with_norm_map
from sharp.exporter.checkpoints.norm_options import NO_OPTIONS, NormOptions, norm_parameters
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.checkpoints.source import Source
from sharp.exporter.forms.contiguous.genai import write_genai_config
from sharp.exporter.forms.form import Form, make_form
from sharp.exporter.forms.uncached.model import STATS
from sharp.exporter.graph import lowering
from sharp.exporter.graph.graph_options import DEFAULT_GRAPH, TORCH_DTYPES, GraphOptions
from sharp.exporter.graph.half_precision import weights_as, widen_bfloat16
from sharp.exporter.graph.key_screens import key_shifts
from sharp.exporter.graph.quantization import quantize
from sharp.exporter.plan import Plan, make_plan
from sharp.exporter.programs.reading import NO_PROGRAM_OPTIONS, ProgramOptions
from sharp.exporter.staging import Staging, remove_stale
from sharp.exporter.verification.comparison import WIDENED, Runtime, runtimes_of
from sharp.exporter.verification.perplexity import (
    MOST_TOKENS,
    QUANTIZED_TOKENS,
    Perplexity,
    check_text,
    perplexity,
    read_tokens,
    text_losses,
)
from sharp.exporter.verification.report import REPORT_FILE, summary, verification_report
from sharp.exporter.verification.tolerance import Tolerance, tolerance_of
from sharp.exporter.verification.verifier import Text, Verification, number_of_checks, verify
from sharp.models.query_scale import LOG_LENGTH_OFFSET
from sharp.plugins import manifest
from sharp.plugins.checksums import write_manifest
from sharp.plugins.custom.normalizer import is_custom
from sharp.plugins.errors import InputError, SharpError
from sharp.plugins.ops.attributes import DEFAULT_STATS_COLUMNS

TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "transformers")

# phase(name, steps) announces the next phase; what it returns is called after each of its steps.
Phase = Callable[[str, int], Callable[[], None]]


@dataclass(frozen=True)
class ExportSettings:
    """What the user chose; the fields are the options of `sharp-export`."""

    norm: str | None = None  # the source's own
    cache: str = "paged"
    target: manifest.Target | None = None
    norm_options: NormOptions = NO_OPTIONS
    norm_map: Path | None = None
    untrained_norm: bool = False
    trained_norm: Path | None = None
    head: str | None = None
    text: Path | None = None
    graph: GraphOptions = DEFAULT_GRAPH
    program: ProgramOptions = NO_PROGRAM_OPTIONS

    @property
    def chosen_target(self) -> manifest.Target:
        """The target; where none is given, a user's normalizer, which no kernel has, is portable."""
        return self.target or ("portable" if self.norm is not None and is_custom(self.norm) else "onnxruntime")


@dataclass(frozen=True)
class Export:
    """A finished export, verified or not: `verification.failure` says so, and the folder is marked accordingly.

    `perplexity` is there where a norm is untrained or a text given, and the model reads text.
    """

    folder: Path
    manifest: manifest.Manifest
    verification: Verification
    perplexity: Perplexity | None
    report: dict[str, Any]  # of `sharp.exporter.verification.report`


def export(
    path: Path, settings: ExportSettings, folder: Path | None, phase: Phase, on_source: Callable[[Source], None]
) -> Export:
    """Export the checkpoint at `path` into `folder`, which must be empty or not exist.

    A `folder` of None is named after the checkpoint and its norm.

    `on_source` is called when the checkpoint is read, before the long work begins.

    Raises:
        InputError, NotFoundError: see `read_source`, `make_form` and `read_tokens`; or the norm is untrained and the
            settings do not allow that; or `folder` is not empty or cannot be written.
    """
    source, form, settings, folder = _prepare(path, settings, folder, phase)
    target = folder.resolve()  # a rename to "." is refused
    on_source(source)
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        staging = Staging(target)
    except OSError as error:
        raise InputError(f"the output folder {folder} cannot be made: {error.strerror}") from error
    try:
        result = _export_into(staging.path, source, form, settings, target.name, phase)
        staging.publish()
    except OSError as error:
        raise SharpError(f"the model cannot be written to {folder.parent}: {error}") from error
    finally:
        staging.remove()
        if not target.exists():
            for parent in made:  # innermost first
                with suppress(OSError):  # another has put something there
                    parent.rmdir()
    return Export(folder, *result)


def dry_run(
    path: Path, settings: ExportSettings, folder: Path | None, phase: Phase, on_source: Callable[[Source], None]
) -> Plan:
    """What `export` would do; it refuses what `export` refuses before its long work, and writes nothing.

    Raises:
        InputError, NotFoundError: see `export`.
    """
    source, form, settings, _ = _prepare(path, settings, folder, phase)
    on_source(source)
    parameters = norm_parameters(form.config, settings.norm_options, source.learned)
    return make_plan(source, form, settings.graph, settings.chosen_target, parameters)


def check_output(folder: Path) -> None:
    """Raises InputError if an export cannot be put there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"the output folder {folder} is not empty; choose another with -o, or remove it first")
    if folder.resolve().is_mount():  # a container's volume, say
        raise InputError(
            f"the output folder {folder} is a mount point, which a finished export cannot take the place of; choose a "
            f"folder in it: -o {folder / 'model'}"
        )


def _check_target(settings: ExportSettings) -> None:
    settings.graph.check(settings.cache, settings.chosen_target)
    if settings.norm is not None and is_custom(settings.norm) and settings.chosen_target != "portable":
        raise InputError(f"no kernel has --norm {settings.norm}; leave --target {settings.target} out")


def _prepare(
    path: Path, settings: ExportSettings, folder: Path | None, phase: Phase
) -> tuple[Source, Form, ExportSettings, Path]:
    """What is exported and how, with a norm and a folder in any case."""
    name = path.stem if path.is_file() else path.resolve().name
    if folder is None and settings.norm is not None:
        folder = Path(f"{name}-{settings.norm}")
    if folder is not None:
        check_output(folder)  # before the long reading
    _check_target(settings)
    phase("Reading the checkpoint", 1)
    program = replace(settings.program, max_context=settings.graph.max_context)
    source = read_source(path, settings.norm, settings.norm_options, program, settings.trained_norm, settings.head)
    settings = replace(settings, norm=source.model.config.norm)
    _check_target(settings)
    if folder is None:
        folder = Path(f"{name}-{settings.norm}")
        check_output(folder)
    if settings.norm_map is not None:
        source = with_norm_map(source, settings.norm_map, path)
    named = source.model.head_norms() if isinstance(source.model, MappedDecoder) else ()
    if settings.chosen_target != "portable" and (own := [one.name for one in named if is_custom(one.normalizer)]):
        raise InputError(f"no kernel has the norm {own[0]} of {settings.norm_map}: it needs --target portable")
    form = make_form(settings.cache, source, path, settings.graph, settings.chosen_target)
    settings.graph.context_of(form.config, form.positions)
    if not (source.trained or settings.untrained_norm):
        raise InputError(
            f"{path} was trained with --norm {source.original.config.norm}, not with {_norm_name(source)}, which makes "
            "its output worse; pass --untrained-norm to export it all the same"
        )
    if settings.text is not None:
        check_text(settings.text)
    if settings.text is not None and not source.reads_text:
        raise InputError(f"{path} does not read text (it is no decoder, or has no tokenizer); leave --text out")
    return source, form, settings, folder


def _export_into(
    staging: Path, source: Source, form: Form, settings: ExportSettings, name: str, phase: Phase
) -> tuple[manifest.Manifest, Verification, Perplexity | None, dict[str, Any]]:
    if source.write_tokenizer is not None:
        source.save_tokenizer(staging)
    measured, text = None, None
    if source.reads_text and not (source.trained and settings.text is None and settings.graph.quantize is None):
        most = MOST_TOKENS if settings.graph.quantize is None else QUANTIZED_TOKENS
        vocab_size = form.config.vocab_size
        name_of_text, tokens = read_tokens(settings.text, staging / "tokenizer.json", vocab_size, most)
        measured, text = _measure(source, name_of_text, tokens, phase("Measuring perplexity", 1 + (not source.trained)))
    shifts: dict[str, Tensor] = {}
    if form.cache.key_screens:
        phase("Measuring keys", 1)
        assert isinstance(source.model, Decoder)
        shifts = key_shifts(source.model, form.cache, _some_tokens(source, settings, staging))
    phase("Tracing and lowering to ONNX", 1)
    tracing = form.trace()
    with weights_as(tracing.module, TORCH_DTYPES[settings.graph.dtype]):
        graph = lowering.lower(tracing, settings.graph.opset)
        lowering.add_key_shifts(graph, shifts)
        windows, columns = lowering.windows_of(graph), lowering.stats_columns_of(graph)
        phase("Writing the model", 1)
        lowering.write(graph, staging, tracing.defaults, settings.chosen_target)
        checked = staging
        if settings.graph.dtype == "bfloat16":
            checked = Path(tempfile.mkdtemp(dir=staging))
            widen_bfloat16(graph)
            lowering.write(graph, checked, tracing.defaults, settings.chosen_target)
    lowering.release_weights(graph)
    del tracing
    routed = isinstance(source.model, Decoder) and source.model.routed
    selects = form.config.scheme.normalizer == "entmax"
    exact = tolerance_of(settings.graph, quantized=False, stepwise=routed)
    tolerance = tolerance_of(settings.graph, quantized=True, stepwise=routed or selects)
    verification = _verify(checked, form, settings, text, phase, (exact, tolerance))
    if checked != staging:
        shutil.rmtree(checked)
    report = verification_report(source, form, settings.chosen_target, verification, measured, tolerance)
    described = describe(
        *(source, form, settings, name, windows, columns),
        verified=verification.passed,
        found=summary(verification, measured),
    )
    if form.cache.form == "contiguous" and not described.norm.heads:  # others know one cache a layer, all of one size
        write_genai_config(staging, described)
        if source.write_config is not None:
            source.write_config(staging)
    (staging / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    described = write_manifest(staging, described)
    return described, verification, measured, report


def _verify(
    folder: Path,
    form: Form,
    settings: ExportSettings,
    text: Text | None,
    phase: Phase,
    tolerances: tuple[Tolerance, Tolerance],
) -> Verification:
    """Compare the model in `folder` with PyTorch; then quantize it, if requested, and compare it again.

    `tolerances` are of the model before it is quantized and after.
    """
    verifier, options = form.verifier(), settings.graph
    runtimes = runtimes_of(settings.chosen_target, form.cache)
    if options.dtype == "bfloat16":
        runtimes = tuple(Runtime(f"{name} {WIDENED}", kernels) for name, kernels in runtimes)
    only = text if options.quantize is None else None  # reading a text takes longer than all the rest
    on_check = phase("Verifying against PyTorch", number_of_checks(verifier, runtimes, only))
    found = verify(verifier, folder, runtimes, only, on_check, tolerances[0])
    if options.quantize is None:
        return found
    phase(f"Quantizing to {options.quantize}", 1)
    quantize(folder, options.quantize, form.config)
    runtimes = tuple(Runtime(f"{name} {options.quantize}", kernels) for name, kernels in runtimes)
    on_check = phase(f"Verifying the {options.quantize} model", number_of_checks(verifier, runtimes, text))
    return found + verify(verifier, folder, runtimes, text, on_check, tolerances[1])


def _some_tokens(source: Source, settings: ExportSettings, staging: Path) -> Tensor:
    """Tokens of the text to measure on, or random ones where the model reads no text."""
    vocab_size = source.model.config.vocab_size
    if source.reads_text:
        return read_tokens(settings.text, staging / "tokenizer.json", vocab_size)[1]
    return torch.randint(vocab_size, (MOST_TOKENS,), generator=torch.Generator().manual_seed(0))


def _norm_name(source: Source) -> str:
    return source.model.norm_name if isinstance(source.model, Decoder) else source.model.config.norm


def _windows_of_layers(source: Source, windows: Sequence[int], max_context: int) -> tuple[int, ...]:
    """Of the nodes' windows (-1: none) those of the layers, all of whose nodes have the same."""
    if max(windows) < 0:
        return ()
    nodes = (len(source.model.layer_parts(layer)) for layer in range(source.model.config.layers))
    of_layers = [windows[end - 1] for end in accumulate(nodes)]
    return tuple(min(window, max_context) if window >= 0 else max_context for window in of_layers)


def _with_columns(port: manifest.Port, columns: int) -> manifest.Port:
    """An output; that of the statistics with so many columns."""
    if port.name != STATS or columns == DEFAULT_STATS_COLUMNS:
        return port
    return port.model_copy(update={"shape": (*port.shape[:-1], columns), "doc": f"{port.doc}, the sink's mass"})


def _measure(source: Source, text: str, tokens: Tensor, on_step: Callable[[], None]) -> tuple[Perplexity, Text]:
    losses: list[Tensor] = []
    for model in (source.original,) if source.trained else (source.original, source.model):
        assert isinstance(model, Decoder)
        losses.append(text_losses(model, tokens))
        on_step()
    norms = source.original.config.norm, _norm_name(source)
    before, after = perplexity(losses[0]), perplexity(losses[-1])
    return Perplexity(text, len(tokens), *norms, before, after), Text(tokens.numpy(), losses[-1])


def describe(
    source: Source,
    form: Form,
    settings: ExportSettings,
    name: str,
    windows: Sequence[int],
    stats_columns: Literal[4, 5],
    *,
    verified: bool,
    found: manifest.VerificationSummary,
) -> manifest.Manifest:
    """The manifest of an export, with windows and columns of its attention nodes and what verification found."""
    config = form.config
    max_context = settings.graph.context_of(config, form.positions)
    parameters = norm_parameters(config, settings.norm_options, source.learned)
    return manifest.Manifest(
        sharp_version=version("sharp-attention"),
        name=name,
        kind=form.kind,
        source=manifest.SourceRecord(
            name=source.name,
            architecture=source.architecture,
            sha256=source.sha256,
            task=source.task,
            task_parameters=dict(source.task_parameters),
        ),
        model_file=lowering.MODEL_FILE,
        dtype=settings.graph.dtype,
        quantization=settings.graph.quantize,
        opset=settings.graph.opset,
        layers=config.layers,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        value_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_context=max_context,
        trained_context=config.trained_context,
        positions=form.positions,
        windows=_windows_of_layers(source, windows, max_context),
        norm=manifest.Norm(
            name=config.norm,
            normalizer=config.scheme.normalizer,
            trained=source.trained,
            alpha=config.alpha,
            temperature_coefficients=config.temperature_coefficients,
            entropy_threshold=config.entropy_threshold,
            temperature=config.temperature,
            log_length_offset=settings.norm_options.log_length_offset or LOG_LENGTH_OFFSET,
            parameters=parameters,
            heads=source.model.head_norms() if isinstance(source.model, MappedDecoder) else (),
        ),
        target=settings.chosen_target,
        cache=form.cache,
        inputs=form.inputs,
        stats_columns=stats_columns,
        outputs=tuple(_with_columns(port, stats_columns) for port in form.outputs),
        tokenizer=manifest.Tokenizer(
            file=None if source.write_tokenizer is None else "tokenizer.json",
            bos_token_id=config.bos_token_id,
            eos_token_ids=config.eos_token_ids,
            token_types=source.token_types,
        ),
        sampling=source.sampling,
        embedding=source.embedding,
        classification=source.classification,
        tools={tool: version(tool) for tool in TOOLS},
        verified=verified,
        verification=found,
    )
