"""`sharp-export`, step by step: read, lower, write, verify, then show the folder whole or not at all."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sharp.exporter import lowering
from sharp.exporter.forms import Form, make_form
from sharp.exporter.reading import read_source
from sharp.exporter.source import Source
from sharp.exporter.verification import Comparison
from sharp.plugins import manifest
from sharp.plugins.errors import InputError, SharpError, VerificationError

TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "transformers")

# phase(name, steps) announces the next phase; what it returns is called after each of its steps.
Phase = Callable[[str, int], Callable[[], None]]


@dataclass(frozen=True)
class Export:
    """A finished export."""

    folder: Path
    manifest: manifest.Manifest
    comparisons: tuple[Comparison, ...]


def export(
    path: Path,
    norm: str,
    cache: str,
    folder: Path,
    phase: Phase,
    on_source: Callable[[Source], None],
    norm_options: Mapping[str, Any] | None = None,
) -> Export:
    """Export the checkpoint at `path` with `norm`, in the form `cache`, into `folder`: it must be empty or not exist.

    `on_source` is called when the checkpoint is read, before the long work begins. `norm_options` are fields of the
    configuration, see `sharp.models.temperature_preset`.

    Raises:
        InputError, NotFoundError: see `read_source` and `make_form`; or `folder` is not empty or cannot be written.
        VerificationError: the ONNX model and PyTorch disagree; nothing is left behind.
    """
    target = folder.resolve()  # a rename to "." is refused
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"the output folder {folder} is not empty; choose another with -o, or remove it first")
    phase("Reading the checkpoint", 1)
    source = read_source(path, norm)
    source = read_source(path, norm, norm_options or {})
    form = make_form(cache, source, path)
    on_source(source)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise InputError(f"the output folder {folder} cannot be made: {error.strerror}") from error
    try:
        result = _export_into(staging, source, form, target.name, phase)
        staging.chmod(0o755)  # mkdtemp's folders are private
        staging.replace(target)
    except OSError as error:
        raise SharpError(f"the model cannot be written to {folder.parent}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Export(folder, *result)


def _export_into(
    staging: Path, source: Source, form: Form, name: str, phase: Phase
) -> tuple[manifest.Manifest, tuple[Comparison, ...]]:
    phase("Tracing and lowering to ONNX", 1)
    tracing = form.trace()
    graph = lowering.lower(tracing)
    phase("Writing the model", 1)
    lowering.write(graph, staging, tracing.defaults)
    if source.write_tokenizer is not None:
        source.write_tokenizer(staging)
    comparisons = tuple(form.verify(staging, phase("Verifying against PyTorch", form.checks)))
    failed = [comparison for comparison in comparisons if not comparison.passed]
    if failed:
        raise VerificationError(
            f"the exported model differs from PyTorch in {len(failed)} of {len(comparisons)} checks, first in "
            f"{failed[0].case!r} ({failed[0].runtime}): logits by {failed[0].logits_error:.1e}, "
            f"entropy by {failed[0].entropy_error:.1e}; nothing was written, please report this"
        )
    described = describe(source, form, name, comparisons)
    described.write(staging)
    return described, comparisons


def describe(source: Source, form: Form, name: str, comparisons: tuple[Comparison, ...]) -> manifest.Manifest:
    """The manifest of a verified export."""
    config = form.config
    return manifest.Manifest(
        sharp_version=version("sharp-attention"),
        name=name,
        kind=form.kind,
        source=manifest.Source(
            name=source.name,
            architecture=source.architecture,
            sha256=source.sha256,
            task=source.task,
            task_parameters=dict(source.task_parameters),
        ),
        model_file=lowering.MODEL_FILE,
        opset=lowering.OPSET,
        layers=config.layers,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        value_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        trained_context=config.trained_context,
        positions=form.positions,
        norm=manifest.Norm(
            name=config.norm,
            normalizer=config.scheme.normalizer,
            trained=source.trained,
            alpha=config.alpha,
            temperature_coefficients=config.temperature_coefficients,
            entropy_threshold=config.entropy_threshold,
            temperature=config.temperature,
        ),
        cache=form.cache,
        inputs=form.inputs,
        outputs=form.outputs,
        tokenizer=manifest.Tokenizer(
            file=None if source.write_tokenizer is None else "tokenizer.json",
            bos_token_id=config.bos_token_id,
            eos_token_ids=config.eos_token_ids,
        ),
        tools={tool: version(tool) for tool in TOOLS},
        verification=_summary(comparisons),
    )


def _summary(comparisons: tuple[Comparison, ...]) -> dict[str, Any]:
    return {"passed": True, "comparisons": [asdict(comparison) for comparison in comparisons]}
