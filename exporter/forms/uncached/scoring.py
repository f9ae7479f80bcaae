"""How a folder exported with `--cache none` does a task, on the very samples that `sharp.models.evaluate` uses."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from sharp.exporter.checkpoints.norm_options import options_of
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.checkpoints.uncached_model import UncachedModel
from sharp.exporter.forms.form import make_form
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.models.evaluation import Row, measure
from sharp.models.tasks.recipe import with_parameters, with_stored_parameters
from sharp.models.tasks.registry import TASKS, get_task
from sharp.models.tasks.scoring import Scorable
from sharp.models.tasks.task import Sampler, Sweep, Task
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import Manifest, read_manifest

RUNTIMES = {"kernels": True, "body": False}
TASK_MODELS = {"decoder": "tokens", "numbers": "numbers", "set": "set"}  # kind of manifest -> model of a task


@dataclass(frozen=True)
class RuntimeRow(Row):
    """A measurement, and what ran the model: kernels or the inlined body in ONNX Runtime, PyTorch, or a server."""

    runtime: str


@dataclass(frozen=True)
class ScoredConfig:
    """What scoring asks of a model's configuration; `q_heads` is 0 where no weights are held in memory."""

    norm: str
    vocab_size: int
    q_heads: int


class ExportedModel:
    """A model folder as something that can be scored.

    Raises:
        InputError: the folder has no function body to run.
    """

    def __init__(self, folder: Path, manifest: Manifest, runtime: str, threads: int) -> None:
        kernels = RUNTIMES[runtime]
        if manifest.target == "tensorrt" and not kernels:
            raise InputError(f"{folder} was exported with --target tensorrt and has no body; give --runtime kernels")
        self.session = UncachedSession(folder, kernels=kernels, threads=threads)
        # The kernels are streamed, and the set model has one query.
        heads = 0 if kernels or manifest.kind == "set" else manifest.q_heads
        self.config = ScoredConfig(manifest.norm.name, manifest.vocab_size, heads)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The model's output for a batch."""
        return torch.from_numpy(self.session.run([tensor.numpy() for tensor in inputs]))


class TorchModel:
    """The checkpoint of a folder in PyTorch, with the folder's norm and what the user gave for it.

    Raises:
        NotFoundError, InputError: see `read_source`; or it is not the folder's, or the folder has several norms.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        if manifest.norm.heads:
            raise InputError("the folder has other norms in some heads (--norm-map); leave out --checkpoint")
        source = read_source(checkpoint, manifest.norm.name, options_of(manifest.norm))
        if source.sha256 != manifest.source.sha256:
            raise InputError(
                f"{checkpoint} is not what the folder was exported from (its SHA-256 differs); export it again"
            )
        form = make_form("none", source, checkpoint)
        self.model: UncachedModel = form.model  # type: ignore[attr-defined] # of the form "none"
        heads = 0 if manifest.kind == "set" else manifest.q_heads
        self.config = ScoredConfig(manifest.norm.name, manifest.vocab_size, heads)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The model's output for a batch."""
        output = self.model.own_output(*inputs)
        return self.model.eager(*inputs)[0] if output is None else output


def read_uncached(folder: Path) -> Manifest:
    """The manifest of a folder that can be evaluated.

    Raises:
        NotFoundError, InputError: see `read_manifest`; or the folder has another form.
    """
    manifest = read_manifest(folder)
    if manifest.cache.form != "none":
        raise InputError(
            f"{folder} was exported with --cache {manifest.cache.form}, but evaluation needs --cache none; "
            "export the checkpoint again"
        )
    return manifest


def find_task(manifest: Manifest, named: str | None) -> Task:
    """The task to evaluate: the one that the user named, else the one that the checkpoint was trained for.

    Raises:
        InputError: neither is known, or the model is not of the kind that the task needs.
    """
    name = named or manifest.source.task
    if name is None:
        raise InputError(f"the checkpoint did not say its task; give one with --task: {', '.join(TASKS)}")
    task = get_task(name)
    if TASK_MODELS.get(manifest.kind) != task.model:
        raise InputError(f"task {name} is not for a {manifest.source.architecture}; choose another with --task")
    return task


def sampler_of(manifest: Manifest, task: Task, parameters: tuple[str, ...]) -> Sampler:
    """The task's sampler as it was in training, where the folder is of this task, and then with `parameters`.

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
    """A row for every model, by the name of its runtime, and every length; see `sharp.models.evaluation.measure`."""
    return [
        RuntimeRow(**asdict(row), runtime=runtime)
        for runtime, model in models.items()
        for row in measure(model, task, sampler, lengths, sweep, samples, seed)
    ]
