"""The steps of `sharp-export`: read, lower, write, verify, then publish the folder whole or not at all."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sharp.core import manifest
from sharp.core.checksums import write_manifest
from sharp.core.errors import InputError, SharpError
from sharp.core.output_file import check_disk, room
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.checkpoints.sampling_defaults import chosen_sampling
from sharp.exporter.forms.contiguous.genai import write_genai_config
from sharp.exporter.forms.form import Form, make_form
from sharp.exporter.forms.uncached.model import STATS
from sharp.exporter.graph import lowering
from sharp.exporter.graph.graph_options import DEFAULT_GRAPH, TORCH_DTYPES, GraphOptions
from sharp.exporter.graph.half_precision import weights_as, widen_bfloat16
from sharp.exporter.graph.key_screens import key_shifts
from sharp.exporter.graph.quantization import quantize
from sharp.exporter.plan import ExportPlan, disk_bytes, make_plan
from sharp.exporter.programs.reading import NO_PROGRAM_OPTIONS, ProgramOptions
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.mapped_decoder import with_norm_map
from sharp.exporter.sources.norm_options import NO_OPTIONS, NormOptions, norm_parameters
from sharp.exporter.sources.source import Source
from sharp.exporter.staging import Staging, check_output, remove_stale
from sharp.exporter.verification.comparison import WIDENED, Runtime, runtimes_of
from sharp.exporter.verification.expected_entropy import expected_entropy
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
from sharp.exporter.verification.second_reader import checked_against
from sharp.exporter.verification.tolerance import ExportTolerance, tolerance_of
from sharp.exporter.verification.verifier import Text, Verification, number_of_checks, verify
from sharp.models.query_scale import LOG_LENGTH_OFFSET
from sharp.plugins.op.attributes import DEFAULT_STATS_COLUMNS
from sharp.plugins.op.custom_normalizer import is_custom

TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "transformers")

# phase(name, steps) announces the next phase. It returns a function that is called after each step of this phase.
Phase = Callable[[str, int], Callable[[], None]]


@dataclass(frozen=True)
class ExportSettings:
    """The settings of an export that the user chose; the fields are the options of `sharp-export`."""

    norm: str | None = None  # None means the norm of the checkpoint
    cache: str = "paged"
    target: manifest.Target | None = None
    norm_options: NormOptions = NO_OPTIONS
    norm_map: Path | None = None
    untrained_norm: bool = False
    trained_norm: Path | None = None
    head: str | None = None
    ignore_keys: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()  # NAME=VALUE
    text: Path | None = None
    graph: GraphOptions = DEFAULT_GRAPH
    program: ProgramOptions = NO_PROGRAM_OPTIONS

    @property
    def chosen_target(self) -> manifest.Target:
        """The target. The default is onnxruntime, or portable for a user's own normalizer, which no kernel has."""
        return self.target or ("portable" if self.norm is not None and is_custom(self.norm) else "onnxruntime")


@dataclass(frozen=True)
class Export:
    """A finished export. If `verification.failure` is set, the folder is marked as unverified.

    `perplexity` is set if the model reads text, and the norm is untrained or a text was given or the model is
    quantized.
    """

    folder: Path
    manifest: manifest.Manifest
    verification: Verification
    perplexity: Perplexity | None
    report: dict[str, Any]  # the content of report.json, see `sharp.exporter.verification.report`


def export(
    path: Path, settings: ExportSettings, folder: Path | None, phase: Phase, on_source: Callable[[Source], None]
) -> Export:
    """Export the checkpoint at `path` into `folder`, which must be empty or not exist.

    A failed verification raises nothing: the folder is written, and `verification.failure` of the result is set.

    Args:
        path: the checkpoint.
        settings: the settings of the export.
        folder: the folder to write; None means a folder named after the checkpoint and the norm.
        phase: is called with the name of each phase and its number of steps, and returns a function that is called
            after each of these steps.
        on_source: is called with the source once, when the checkpoint is read and before the long work begins.

    Raises:
        NotFoundError: the checkpoint, the text, the norm map or another file of the settings does not exist.
        InputError: the checkpoint or the text cannot be read, or the model cannot have this form; or the norm is
            untrained and the settings do not allow that; or `folder` is not empty or cannot be made.
        SharpError: the folder cannot be written.
    """
    if folder is None and settings.norm is not None:
        folder = default_folder(path, settings.norm)
    with ExitStack() as stack:
        # An export to the same folder that runs already is found here, before the checkpoint is read. Without a norm,
        # the folder's name is known only when the checkpoint is read.
        early = None if folder is None else stack.enter_context(_staged(folder))
        source, form, settings, folder = _prepare(path, settings, folder, phase)
        staging = stack.enter_context(_staged(folder)) if early is None else early
        on_source(source)
        check_disk(disk_bytes(source.model, settings.graph, form.config), folder)
        against = checked_against(
            *(path, source, folder),
            program=path.suffix == ".pt2" or settings.program.exported is not None,
            cache=form.cache.form,
        )
        try:
            result = _export_into(staging.path, source, form, settings, folder.resolve().name, phase, against)
            staging.publish()
        except OSError as error:
            raise SharpError(f"the model cannot be written to {folder.parent}: {error}{room(error)}") from error
    return Export(folder, *result)


@contextmanager
def _staged(folder: Path) -> Iterator[Staging]:
    """Yield a staging folder for `folder`, and remove what is left of it, with its new parents, at the end.

    Raises:
        InputError: `folder` cannot be made, is not empty, or another command is writing it.
    """
    check_output(folder)
    target = folder.resolve()  # the system refuses a rename to "."
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        staging = Staging(target)
    except OSError as error:
        raise InputError(
            f"the output folder {folder} cannot be made: {error.strerror}; choose another with -o"
        ) from error
    try:
        yield staging
    finally:
        staging.remove()
        if not target.exists():
            for parent in made:  # innermost first
                with suppress(OSError):  # another process has put something into the folder
                    parent.rmdir()


def default_folder(path: Path, norm: str) -> Path:
    """Return the output folder of an export whose user named none: the checkpoint's name and the norm."""
    return Path(f"{path.stem if path.is_file() else path.resolve().name}-{norm}")


def dry_run(
    path: Path, settings: ExportSettings, folder: Path | None, phase: Phase, on_source: Callable[[Source], None]
) -> ExportPlan:
    """Plan an export without writing anything, with the checks that `export` makes before its long work.

    The arguments are those of `export`; `on_source` gets the checkpoint as soon as it is read.

    Raises:
        NotFoundError: the checkpoint, the text, the norm map or another file of the settings does not exist.
        InputError: `export` would refuse the checkpoint, the settings or the folder.
    """
    source, form, settings, _ = _prepare(path, settings, folder, phase)
    on_source(source)
    parameters = norm_parameters(form.config, settings.norm_options, source.learned)
    return make_plan(source, form, settings.graph, settings.chosen_target, parameters)


def _check_target(settings: ExportSettings) -> None:
    """Check that the target supports cache, precision and norm, else raise InputError."""
    settings.graph.check(settings.cache, settings.chosen_target)
    if settings.norm is not None and is_custom(settings.norm) and settings.chosen_target != "portable":
        raise InputError(f"no kernel has --norm {settings.norm}; leave --target {settings.target} out")


def _prepare(
    path: Path, settings: ExportSettings, folder: Path | None, phase: Phase
) -> tuple[Source, Form, ExportSettings, Path]:
    """Read the checkpoint and complete the settings: choose the norm and the output folder where the user did not.

    Return the source, the model in its form, the completed settings and the output folder.

    Raises:
        NotFoundError: the checkpoint or another file of the settings does not exist.
        InputError: the checkpoint cannot be read, an option does not fit it, the norm is untrained and not allowed, or
            the model cannot have the form.
    """
    if folder is None and settings.norm is not None:
        folder = default_folder(path, settings.norm)
    if folder is not None:
        check_output(folder)  # before the checkpoint is read, which takes long
    _check_target(settings)
    phase("Reading the checkpoint", 1)
    program = replace(settings.program, max_context=settings.graph.max_context)
    source = read_source(
        path,
        settings.norm,
        settings.norm_options,
        program,
        settings.trained_norm,
        settings.head,
        settings.ignore_keys,
    )
    source = source.checked_tokens()
    if settings.sampling:
        if not isinstance(source.model, Decoder):
            raise InputError(f"--sampling is for models that generate text, and {path} is none; leave it out")
        sampling = chosen_sampling(settings.sampling, source.sampling)
        sampled_from = " and ".join(filter(None, ("--sampling", source.sampling_source)))
        source = replace(source, sampling=sampling, sampling_source=sampled_from)
    settings = replace(settings, norm=source.model.config.norm)
    _check_target(settings)
    if folder is None:
        folder = default_folder(path, source.model.config.norm)
        check_output(folder)
    if settings.norm_map is not None:
        source = with_norm_map(source, settings.norm_map, path)
    named = source.model.head_norms() if isinstance(source.model, Decoder) else ()
    if settings.chosen_target != "portable" and (own := [norm.name for norm in named if is_custom(norm.normalizer)]):
        raise InputError(f"no kernel has the norm {own[0]} of {settings.norm_map}: export with --target portable")
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
    staging: Path, source: Source, form: Form, settings: ExportSettings, name: str, phase: Phase, against: str
) -> tuple[manifest.Manifest, Verification, Perplexity | None, dict[str, Any]]:
    """Export the model into the folder `staging`, and verify it there.

    `phase` (title, steps) starts a line of progress and returns the function to call per step. `against` describes the
    second reader of the checkpoint.

    Returns:
        the manifest, the result of verification, perplexity (None if the model reads no text) and the report.
    """
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
        shifts = key_shifts(source.model, form.cache, _some_tokens(source, settings, staging)[1])
    phase("Tracing and lowering to ONNX", 1)
    tracing = form.trace()
    with weights_as(tracing.module, TORCH_DTYPES[settings.graph.dtype]):
        graph = lowering.lower(tracing, settings.graph.opset)
        lowering.add_key_shifts(graph, shifts)
        windows_of_nodes, columns = lowering.windows_of(graph), lowering.stats_columns_of(graph)
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
    windows = _windows_of_layers(source, windows_of_nodes, settings.graph.context_of(form.config, form.positions))
    expected = None
    if isinstance(source.model, Decoder):
        expected = expected_entropy(source.model, *_some_tokens(source, settings, staging), windows)
    report = verification_report(
        source,
        form.config.norm,
        form.cache.form,
        settings.chosen_target,
        verification,
        measured,
        tolerance,
        against,
    )
    described = describe(
        *(source, form, settings, name, windows, columns),
        verified=verification.passed,
        found=summary(verification, measured),
        expected=expected,
    )
    # Other tools support exactly one cache per layer, and keys and values of one size in all of them.
    alike = not described.norm.heads and described.value_dim == described.head_dim
    if form.cache.form == "contiguous" and alike:
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
    tolerances: tuple[ExportTolerance, ExportTolerance],
) -> Verification:
    """Compare the model in `folder` with PyTorch; then quantize the model, if requested, and compare it again.

    `tolerances` are those before and after the quantization.
    """
    verifier, options = form.verifier(), settings.graph
    runtimes = runtimes_of(settings.chosen_target, form.cache)
    if options.dtype == "bfloat16":
        runtimes = tuple(Runtime(f"{name} {WIDENED}", kernels) for name, kernels in runtimes)
    only = text if options.quantize is None else None  # reading a text takes longer than all other checks
    on_check = phase("Verifying against PyTorch", number_of_checks(verifier, runtimes, only))
    found = verify(verifier, folder, runtimes, only, on_check, tolerances[0])
    if options.quantize is None:
        return found
    phase(f"Quantizing to {options.quantize}", 1)
    quantize(folder, options.quantize, form.config)
    runtimes = tuple(Runtime(f"{name} {options.quantize}", kernels) for name, kernels in runtimes)
    on_check = phase(f"Verifying the {options.quantize} model", number_of_checks(verifier, runtimes, text))
    return found + verify(verifier, folder, runtimes, text, on_check, tolerances[1])


def _some_tokens(source: Source, settings: ExportSettings, staging: Path) -> tuple[str, Tensor]:
    """Return the name and the tokens of the text to measure on, or random tokens if the model cannot read the text."""
    vocab_size = source.model.config.vocab_size
    if source.reads_text:
        try:
            return read_tokens(settings.text, staging / "tokenizer.json", vocab_size)
        except InputError:  # not every tokenizer can encode the default text, Sharp's licence
            if settings.text is not None:
                raise
    return "random tokens", torch.randint(vocab_size, (MOST_TOKENS,), generator=torch.Generator().manual_seed(0))


def _norm_name(source: Source) -> str:
    """Return the name of the source's norm; a decoder with several per head has a name of its own."""
    return source.model.norm_name if isinstance(source.model, Decoder) else source.model.config.norm


def _windows_of_layers(source: Source, windows: Sequence[int], max_context: int) -> tuple[int, ...]:
    """Return the sliding window of each layer, at most `max_context`; empty if no layer has a window.

    `windows` has the window of each attention node, where -1 means none. All nodes of a layer have the same window.
    """
    if max(windows) < 0:
        return ()
    nodes = (len(source.model.layer_parts(layer)) for layer in range(source.model.config.layers))
    of_layers = [windows[end - 1] for end in accumulate(nodes)]
    return tuple(min(window, max_context) if window >= 0 else max_context for window in of_layers)


def _with_columns(port: manifest.Port, columns: int) -> manifest.Port:
    """Return `port`; if it is the output of the statistics, with `columns` as its last dimension."""
    if port.name != STATS or columns == DEFAULT_STATS_COLUMNS:
        return port
    return port.model_copy(update={"shape": (*port.shape[:-1], columns), "doc": f"{port.doc}, the sink's mass"})


def _measure(source: Source, text: str, tokens: Tensor, on_step: Callable[[], None]) -> tuple[Perplexity, Text]:
    """Return the perplexity of the original and the exported norm over `tokens`, and the tokens with their losses.

    `text` names the text. `on_step` is called after each model; a trained model is measured once.
    """
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
    expected: manifest.ExpectedEntropy | None,
) -> manifest.Manifest:
    """Return the manifest of an export, without the checksums of its files.

    Args:
        source: The checkpoint.
        form: The form of the model.
        settings: The settings of the export.
        name: The name of the model.
        windows: The sliding window of each layer; empty if no layer has a window.
        stats_columns: The number of columns of the output `stats`.
        verified: Whether all checks passed.
        found: The summary of the verification.
        expected: The entropies of the heads in PyTorch, for decoders.
    """
    config = form.config
    max_context = settings.graph.context_of(config, form.positions)
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
        value_dim=config.value_dim,
        vocab_size=config.vocab_size,
        max_context=max_context,
        trained_context=config.trained_context,
        positions=form.positions,
        windows=tuple(windows),
        norm=_norm(source, form, settings),
        target=settings.chosen_target,
        cache=form.cache,
        inputs=form.inputs,
        stats_columns=stats_columns,
        outputs=tuple(_with_columns(port, stats_columns) for port in form.outputs),
        tokenizer=manifest.TokenizerSettings(
            file=None if source.write_tokenizer is None else "tokenizer.json",
            bos_token_id=config.bos_token_id,
            eos_token_ids=config.eos_token_ids,
            token_types=source.token_types,
        ),
        sampling=source.sampling,
        sampling_source=source.sampling_source,
        embedding=source.embedding,
        classification=source.classification,
        tools={tool: version(tool) for tool in TOOLS},
        verified=verified,
        verification=found,
        expected_entropy=expected,
    )


def _norm(source: Source, form: Form, settings: ExportSettings) -> manifest.Norm:
    """Return the manifest's entry of the norm: its parameters, and the norms per head if they differ."""
    config = form.config
    return manifest.Norm(
        name=config.norm,
        normalizer=config.scheme.normalizer,
        trained=source.trained,
        alpha=config.alpha,
        temperature_coefficients=config.temperature_coefficients,
        entropy_threshold=config.entropy_threshold,
        temperature=config.temperature,
        log_length_offset=settings.norm_options.log_length_offset or LOG_LENGTH_OFFSET,
        parameters=norm_parameters(config, settings.norm_options, source.learned),
        heads=source.model.head_norms() if isinstance(source.model, Decoder) else (),
    )
