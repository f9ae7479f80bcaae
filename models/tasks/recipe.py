"""The model and the training settings that follow from a task and the user's choices."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TypeVar

from sharp.core.errors import InputError
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Model
from sharp.models.config import Positions, SharpConfig
from sharp.models.max_retrieval import MaxRetrieval, MaxRetrievalConfig
from sharp.models.number_sequence import SharpForNumbers
from sharp.models.ssa_parameters import SsaParameters
from sharp.models.tasks.task import DecoderShape, Sampler, Task
from sharp.models.trainer import Stage, TrainSettings

MAX_CONTEXT = 2**17
MOST_SSA_N = 1e6
ROPE_FACTOR = 16.0  # ASEntmax App. G.2, the best factor from 4 to 32 on flip-flop

SamplerT = TypeVar("SamplerT", bound=Sampler)


@dataclass(frozen=True)
class Choices:
    """The user's choices for a run; None means the task's default, and for `gamma` and `ssa_n` that they are learned.

    `alpha` 0 is the norm's default. `lengths` are the smallest and the largest length of training samples, of which
    only every `length_step`-th is used. `rope_factor` stretches RoPE and matters to positions "rope" only.
    """

    norm: str
    positions: Positions = "nape"
    rope_factor: float = ROPE_FACTOR
    alpha: float = 0.0
    gamma: float | None = None
    ssa_n: float | None = None
    temperature: float | None = None
    layers: int | None = None
    heads: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    steps: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    final_learning_rate: float | None = None
    lengths: tuple[int, int] | None = None
    length_step: int | None = None
    seed: int = 0
    bfloat16: bool = False
    compile: bool = False


def choose_task(task: Task, choices: Choices, parameters: tuple[str, ...]) -> Task:
    """Return `task` with the chosen sizes, lengths and schedule, and its sampler with `parameters`, each FIELD=VALUE.

    A run with another number of steps than the paper's keeps the shape of the schedule: warm-up and stages are scaled.

    Raises:
        InputError: a choice is not possible; the message names the choice and the limit.
    """
    training = task.training
    steps = choices.steps or training.steps
    share = steps / training.steps
    stages = tuple(replace(stage, start_step=round(stage.start_step * share)) for stage in training.stages)
    if choices.lengths is not None:
        stages = (Stage(0, *choices.lengths, every=training.stages[0].every),)
    if choices.length_step is not None:
        stages = tuple(replace(stage, every=choices.length_step) for stage in stages)
    training = replace(
        training,
        steps=steps,
        batch=choices.batch or training.batch,
        stages=stages,
        learning_rate=training.learning_rate if choices.learning_rate is None else choices.learning_rate,
        warmup_steps=round(training.warmup_steps * share),
    )
    if training.final_learning_rate == task.training.learning_rate:  # a constant rate stays constant
        training = replace(training, final_learning_rate=training.learning_rate)
    if choices.final_learning_rate is not None:
        training = replace(training, final_learning_rate=choices.final_learning_rate)
    shape = task.shape
    if shape is not None:
        shape = DecoderShape(
            choices.layers or shape.layers,
            choices.heads or shape.q_heads,
            choices.hidden_size or shape.hidden_size,
            choices.intermediate_size or shape.intermediate_size,
        )
        if shape.hidden_size % shape.q_heads:
            raise InputError(
                f"hidden size {shape.hidden_size} cannot be divided among {shape.q_heads} heads; choose a multiple"
            )
    elif choices.layers or choices.heads or choices.intermediate_size:
        raise InputError(
            f"{task.name} has one layer with one head, by its paper: leave out --layers, --heads, --intermediate-size"
        )
    chosen = replace(task, sampler=with_parameters(task.sampler, parameters), training=training, shape=shape)
    for stage in training.stages:
        for length in stage.lengths:
            chosen.sampler.tokens(length)  # refuses impossible lengths before anything is built
    return chosen


def with_parameters(sampler: SamplerT, parameters: tuple[str, ...]) -> SamplerT:
    """Return `sampler` with other values of its fields, each given as FIELD=VALUE.

    Raises:
        InputError: a field does not exist, or a value is of another type or out of range.
    """
    values: dict[str, object] = {}
    types = _field_types(sampler)
    for parameter in parameters:
        name, _, text = parameter.partition("=")
        if name not in types:
            raise InputError(f"{parameter!r} sets no parameter of this task; its parameters are: {', '.join(types)}")
        values[name] = _parse(name, text, types[name])
    return replace(sampler, **values)  # type: ignore[type-var]


def changed_parameters(default: Sampler, sampler: Sampler) -> dict[str, object]:
    """Return the fields of `sampler` that differ from `default`, in the form that `with_stored_parameters` takes."""
    before, now = asdict(default), asdict(sampler)  # type: ignore[call-overload]
    return {name: value for name, value in now.items() if value != before[name]}


def with_stored_parameters(sampler: SamplerT, stored: Mapping[str, object]) -> SamplerT:
    """Return `sampler` with the parameters of a checkpoint, values by field; other fields stay as they are.

    Raises:
        InputError: a parameter does not exist in this version, or its value is of another type or out of range.
    """
    types = _field_types(sampler)
    for name, value in stored.items():
        if types.get(name) is not type(value):
            raise InputError(f"the checkpoint's task parameter {name} = {value!r} cannot be used; upgrade Sharp")
    return replace(sampler, **stored)  # type: ignore[type-var]


def _field_types(sampler: Sampler) -> dict[str, type]:
    """Return the types of the sampler's fields by name."""
    return {field.name: type(getattr(sampler, field.name)) for field in fields(sampler)}  # type: ignore[arg-type]


def _parse(name: str, text: str, kind: type) -> object:
    """Return the text as a bool, int or float. InputError, with the field `name`, if it is none."""
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{name} is {text!r}, but must be true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise InputError(f"{name} is {text!r}, but must be {'a whole' if kind is int else 'a'} number") from error


def fixed_temperature(norm: str, chosen: float | None) -> float:
    """Return the temperature with which a model of `norm` is configured; 1 unless `norm` is fixed-temperature.

    Raises:
        InputError: no temperature is chosen for fixed-temperature, or a temperature for another norm.
    """
    if norm == "fixed-temperature" and chosen is None:
        raise InputError("norm fixed-temperature needs a temperature; give it with --temperature")
    if norm != "fixed-temperature" and chosen is not None:
        raise InputError(f"norm {norm} has no temperature to fix; leave out --temperature, or choose fixed-temperature")
    return 1.0 if chosen is None else chosen


def fix_ssa_n(model: Model, n: float | None) -> None:
    """Fix the exponent `n` of norm ssa in all heads of `model`, in place, so that it is not trained; None trains n.

    The SSA paper's Table 3 compares fixed exponents.

    Raises:
        InputError: the model's norm has no n, or `n` is out of range.
    """
    if n is None:
        return
    if model.config.norm != "ssa":
        raise InputError(f"norm {model.config.norm} has no n to fix; leave out --ssa-n, or choose ssa")
    if not 1 <= n <= MOST_SSA_N:
        raise InputError(f"--ssa-n is {n:g}, but must be from 1 to {MOST_SSA_N:g}")
    for module in model.modules():
        if isinstance(module, SsaParameters):
            module.fill(None, n)
            module.n_raw.requires_grad_(False)


def make_model(task: Task, choices: Choices) -> Model:
    """Make a new model of the task's kind and sizes, with weights from PyTorch's random state.

    NAPE is the default for all tasks, because the ASEntmax paper's models do best under NAPE, and the learned positions
    of the SSA paper's GPT-2 end at the training length.

    Raises:
        InputError: sizes and positions, or norm and temperature are incompatible.
    """
    temperature = fixed_temperature(choices.norm, choices.temperature)
    if task.shape is None:
        return MaxRetrieval(
            MaxRetrievalConfig(
                classes=task.sampler.outputs,
                hidden_size=choices.hidden_size or MaxRetrievalConfig.hidden_size,
                norm=choices.norm,
                trained_items=task.longest_training_length,
                alpha=choices.alpha,
                gamma=choices.gamma,
                temperature=temperature,
            )
        )
    config = SharpConfig(
        vocab_size=task.sampler.outputs,
        hidden_size=task.shape.hidden_size,
        intermediate_size=task.shape.intermediate_size,
        layers=task.shape.layers,
        q_heads=task.shape.q_heads,
        kv_heads=task.shape.q_heads,
        head_dim=task.shape.hidden_size // task.shape.q_heads,
        norm=choices.norm,
        positions=choices.positions,
        trained_context=task.sampler.tokens(task.longest_training_length),
        max_context=MAX_CONTEXT,
        alpha=choices.alpha,
        gamma=choices.gamma,
        temperature=temperature,
        rope_factor=choices.rope_factor if choices.positions == "rope" else 1.0,
        rope_scaling="llama3",
        tie_embeddings=False,
    )
    return SharpForCausalLM(config) if task.model == "tokens" else SharpForNumbers(config)


def make_settings(task: Task, choices: Choices) -> TrainSettings:
    """Return the settings of the task's training, with Adam's default betas as in the papers and clipped gradients."""
    training = task.training
    return TrainSettings(
        steps=training.steps,
        stages=training.stages,
        batch_sequences=training.batch,
        learning_rate=training.learning_rate,
        final_learning_rate=training.final_learning_rate,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        betas=(0.9, 0.999),
        seed=choices.seed,
        bfloat16=choices.bfloat16,
        compile=choices.compile,
        log_every=100,
        save_every=1000,
        validate_every=max(1, training.steps // 20),
    )
