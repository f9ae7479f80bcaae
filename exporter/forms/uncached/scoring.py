"""Scores of a folder exported with `--cache none` on a task, with the same samples as in `sharp.models.evaluate`."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.core.manifest import Manifest, read_manifest
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.forms.form import make_form
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.exporter.sources.norm_options import options_of
from sharp.exporter.sources.uncached_model import UncachedModel
from sharp.models.evaluation import Measurement, measure
from sharp.models.tasks.recipe import with_parameters, with_stored_parameters
from sharp.models.tasks.registry import TASKS, get_task
from sharp.models.tasks.scoring import Scorable
from sharp.models.tasks.task import Sampler, Sweep, Task

RUNTIMES = {"kernels": True, "body": False}
TASK_MODELS = {"decoder": "tokens", "numbers": "numbers", "set": "set"}  # manifest.kind -> task.model


@dataclass(frozen=True)
class RuntimeRow(Measurement):
    """A measurement with its runtime: kernels or the inlined body in ONNX Runtime, PyTorch, or a server."""

    runtime: str


@dataclass(frozen=True)
class ScoredConfig:
    """The configuration that scoring reads; `q_heads` is 0 if the runtime holds no attention weights in memory."""

    norm: str
    vocab_size: int
    q_heads: int


class ExportedModel:
    """A model folder in ONNX Runtime that can be scored.

    `runtime` is `kernels` (Sharp's library) or `body` (the inlined function body); `threads` is the number of CPU
    threads (0: all).

    Raises:
        InputError: `runtime` is `body`, and the folder, of target tensorrt, has no function body.
    """

    def __init__(self, folder: Path, manifest: Manifest, runtime: str, threads: int) -> None:
        kernels = RUNTIMES[runtime]
        if manifest.target == "tensorrt" and not kernels:
            raise InputError(f"{folder} was exported with --target tensorrt and has no body; give --runtime kernels")
        self.session = UncachedSession(folder, kernels=kernels, threads=threads)
        # The kernels hold no attention weights, and the weights of the set model's single query are few.
        heads = 0 if kernels or manifest.kind == "set" else manifest.q_heads
        self.config = ScoredConfig(manifest.norm.name, manifest.vocab_size, heads)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the model's output for a batch; the inputs are in the order of the graph."""
        return torch.from_numpy(self.session.run([tensor.numpy() for tensor in inputs]))


class TorchModel:
    """The checkpoint of a model folder in PyTorch, with the folder's norm and the options that the user gave for it.

    Raises:
        NotFoundError: there is no checkpoint.
        InputError: the checkpoint cannot be read or is not the folder's, or heads of the folder have other norms.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        if manifest.norm.heads:
            raise InputError("the folder has other norms in some heads (--norm-map); leave out --checkpoint")
        # The export has checked unknown keys already, and the SHA-256 below shows that the checkpoint is the same.
        source = read_source(checkpoint, manifest.norm.name, options_of(manifest.norm), ignore=("*",))
        if source.sha256 != manifest.source.sha256:
            raise InputError(
                f"{checkpoint} is not what the folder was exported from (its SHA-256 differs); export it again"
            )
        form = make_form("none", source, checkpoint)
        self.model: UncachedModel = form.model  # type: ignore[attr-defined] # of the form "none"
        heads = 0 if manifest.kind == "set" else manifest.q_heads
        self.config = ScoredConfig(manifest.norm.name, manifest.vocab_size, heads)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the model's output for a batch, by the source's own code if that code has the norm."""
        output = self.model.own_output(*inputs)
        return self.model.eager(*inputs)[0] if output is None else output


def read_uncached(folder: Path) -> Manifest:
    """Read the manifest of a folder and check that the folder was exported with `--cache none`.

    Raises:
        NotFoundError: there is no manifest.
        InputError: the manifest is not valid, or the folder has another form.
    """
    manifest = read_manifest(folder)
    if manifest.cache.form != "none":
        raise InputError(
            f"{folder} was exported with --cache {manifest.cache.form}, but evaluation needs --cache none; "
            "export the checkpoint again"
        )
    return manifest


def find_task(manifest: Manifest, named: str | None) -> Task:
    """Return the task to evaluate: `named`, or else the task that the checkpoint was trained for.

    Raises:
        InputError: no task is known, or the model is not of the kind that the task needs.
    """
    name = named or manifest.source.task
    if name is None:
        raise InputError(f"the checkpoint did not say its task; give one with --task: {', '.join(TASKS)}")
    task = get_task(name)
    if TASK_MODELS.get(manifest.kind) != task.model:
        raise InputError(f"task {name} is not for a {manifest.source.architecture}; choose another with --task")
    return task


def sampler_of(manifest: Manifest, task: Task, parameters: tuple[str, ...]) -> Sampler:
    """Return the task's sampler with `parameters`, and with those of the training if the folder is of this task.

    Raises:
        InputError: a parameter cannot be used.
    """
    source = manifest.source
    trained = with_stored_parameters(task.sampler, source.task_parameters if source.task == task.name else {})
    return with_parameters(trained, parameters)


def measure_runtimes(
    models: dict[str, Scorable],
    task: Task,
    sampler: Sampler,
    lengths: tuple[int, ...],
    sweep: Sweep | None,
    samples: int,
    seed: int,
) -> list[RuntimeRow]:
    """Measure every model; return the rows of `sharp.models.evaluation.measure` with the name of the runtime.

    `models` has the models by runtime. The rows of each runtime follow one another, in the same order.
    """
    return [
        RuntimeRow(**asdict(row), runtime=runtime)
        for runtime, model in models.items()
        for row in measure(model, task, sampler, lengths, sweep, samples, seed)
    ]
