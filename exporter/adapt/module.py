"""`sharp.adapt_module`, which replaces the softmax attention of a module by another norm, by distillation.

The module's program (`sharp.exporter.programs`) is teacher and student in one. The student has the norm in place of the
attention found in the graph, the norm's parameters, and low-rank additions to the matrices of linear layers.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from sharp.core.errors import InputError
from sharp.exporter.adapt.recipe import Recipe, alpha_at, batch_at, temperature_at
from sharp.exporter.adapt.state import state_of
from sharp.exporter.adapt.student import SSA_START, check_norm, with_start_values
from sharp.exporter.adapt.training import Progress, descend
from sharp.exporter.module import evaluated, trace
from sharp.exporter.programs.decoder import ProgramDecoder
from sharp.exporter.programs.matrix_products import product_shapes
from sharp.exporter.programs.norm_parameters import NAMES, PARAMETERS
from sharp.exporter.programs.reading import ProgramOptions, read_program, with_norm
from sharp.exporter.sources.norm_options import NormOptions
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, LayerOptions
from sharp.models.normalized_attention import normalized_attention
from sharp.models.norms import NormDefinition, get_norm
from sharp.models.ssa_parameters import SsaParameters

HELD_OUT = 0.1  # share of the tokens, taken from their end
MEASURED = 8  # held-out sequences
FIRST_BETA = -4.0  # c_beta of a scale that depends on the token; softplus gives 0.02, so the factor starts near 1


@dataclass(frozen=True)
class AdaptedModule:
    """The result of `adapt_module`, beside the module's changed weights.

    `export_options` are keyword arguments of `sharp.export` for the adapted module. `raw` and `adapted` are the
    divergences KL(original || adapted) from the original module, in nats per token of held-out text: with softmax
    merely replaced by the norm, and after training.
    """

    export_options: dict[str, Any]
    raw: float
    adapted: float


def adapt_module(
    module: nn.Module,
    tokens: Tensor,
    *,
    norm: str,
    alpha: float | None = None,
    length: int = 256,
    batch: int = 4,
    steps: int = 400,
    rank: int = 16,
    seed: int = 0,
    state: Path | str | None = None,
    on_step: Callable[[Progress], None] = lambda _progress: None,
) -> AdaptedModule:
    """Distil `module`, a causal language model with softmax attention, into one with another norm, on the CPU.

    The module's weights are changed in place; its code is not, so export it with what is returned:
    `sharp.export(module, inputs, **adapted.export_options, output=...)`.

    Args:
        module: in float32; it takes token ids int64 [batch, tokens] and returns logits [batch, tokens, vocabulary].
        tokens: int64 [n], a text like those that it was trained with; the last tenth, at least `length`, is held out.
        norm: a norm that `sharp adapt` takes.
        alpha: entmax's alpha; None: the norm's default.
        length: tokens of a sequence.
        batch: sequences of a step.
        steps: training steps.
        rank: the rank of the additions to the matrices of linear layers.
        seed: seeds the choice of sequences and the start values.
        state: a folder in which the run is saved regularly. A run that was killed continues from there with the same
            arguments, to the same result. The folder is not removed.
        on_step: called after every step.

    Raises:
        InputError: the norm, the tokens or the module cannot be used, or `state` is of another run or not writable.
        SharpError: the loss is no longer finite.
    """
    chosen = with_start_values(norm, NormOptions(alpha=alpha))
    check_norm(norm, chosen)
    for name, value in (("length", length), ("batch", batch), ("steps", steps), ("rank", rank)):
        if value < 1 + (name == "length"):
            raise InputError(f"{name} is {value}, but must be at least {1 + (name == 'length')}")
    held_out = max(length, int(HELD_OUT * tokens.numel()))
    if tokens.dtype != torch.int64 or tokens.ndim != 1 or len(tokens) < held_out + length:
        raise InputError(f"tokens must be int64 [n], at least {2 * length} of them for sequences of {length}")
    with evaluated(module):
        exported = trace(module, (tokens[:length].repeat(2, 1),))
        given = ProgramOptions(exported=exported, name=type(module).__name__, max_context=length)
        source = read_program(Path(type(module).__name__), None, given=given)
    teacher = source.model
    if not isinstance(teacher, ProgramDecoder):
        raise InputError(f"{source.name} is no causal language model, which can be adapted: {source.no_cache}")
    if teacher.config.norm != "softmax":
        raise InputError(f"the attention of {source.name} is {teacher.config.norm} already; give one of softmax")
    if length > teacher.config.max_context:
        raise InputError(
            f"length is {length}, but {source.name} has positions for {teacher.config.max_context} tokens; give "
            "at most that"
        )
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < teacher.config.vocab_size:
        raise InputError(
            f"tokens are from {tokens.min()} to {tokens.max()}, of a vocabulary of {teacher.config.vocab_size}; "
            "give ids of this model's tokenizer"
        )
    recipe = Recipe(steps, length, batch, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = _Student(teacher, norm, chosen, rank)
    windows = tokens[len(tokens) - held_out :].unfold(0, length, length)[:MEASURED]
    raw = student.measure(windows)
    folder, identity = None, ""
    if state is not None:
        folder, identity = Path(state), _identity(module, tokens, student, norm, rank, recipe)
        state_of(folder, identity)  # raises unless the state is of this run
    _train(student, tokens[: len(tokens) - held_out], recipe, on_step, folder, identity)
    adapted = student.measure(windows)
    student.merge_into(module)
    options = {"norm": norm, "trained_norm": True, "norm_parameters": student.norm_parameters()}
    options |= {name: value for name, value in vars(chosen).items() if value is not None}
    return AdaptedModule(options, raw, adapted)


class _LowRank(nn.Module):
    """A parametrization that adds a matrix of low rank to a matrix [rows, columns], starting at 0."""

    def __init__(self, shape: torch.Size, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(min(rank, *shape), shape[1]) / math.sqrt(shape[1]))
        self.up = nn.Parameter(torch.zeros(shape[0], min(rank, *shape)))
        self.enabled = True

    def forward(self, matrix: Tensor) -> Tensor:
        """Return `matrix` plus the low-rank product up @ down; `matrix` itself while the adapter is disabled."""
        return matrix + self.up @ self.down if self.enabled else matrix


class _Student:
    """A program with another norm; `teacher` is the same program with its own norm."""

    def __init__(self, teacher: ProgramDecoder, norm: str, options: NormOptions, rank: int) -> None:
        self.teacher, program = teacher, teacher.program
        given = ProgramOptions(norm_parameters=_start(get_norm(norm)))
        self.config, self.parameters = with_norm(*(program, teacher.attention, teacher.config, norm, options, given))
        self.alpha, self.coefficients = self.config.alpha, self.config.temperature_coefficients
        self.ssa = nn.ModuleList(
            SsaParameters(self.config.q_heads) for _ in range(self.config.layers if norm == "ssa" else 0)
        )
        for parameters in self.ssa:
            parameters.fill(*SSA_START)
        self.decoder = ProgramDecoder(
            *(program, teacher.roles, teacher.attention, teacher.result, self.config, self.parameters, teacher.tables),
            own=False,
        )
        self.matrices: dict[str, _LowRank] = {}
        shapes = product_shapes(program)
        for name, parameter in list(program.named_parameters()):
            if id(parameter) in shapes and self.config.vocab_size not in parameter.shape:
                self.matrices[name] = _LowRank(parameter.shape, rank)
        for name, added in self.matrices.items():
            parametrize.register_parametrization(program, name, added)
        self.parameters.scales.requires_grad_()
        self.norms = [*self.ssa.parameters(), *self.parameters.scales.parameters()]

    def learned(self) -> dict[str, nn.Parameter]:
        """Return all trained parameters by name; names of adapters begin with "matrices."."""
        adapters = {
            f"matrices.{name}.{part}": parameter
            for name, added in self.matrices.items()
            for part, parameter in added.named_parameters()
        }
        return adapters | {f"norms.{index}": parameter for index, parameter in enumerate(self.norms)}

    @contextmanager
    def at(self, share: float) -> Iterator[None]:
        """Use, inside the context, the norm at this share (0 to 1) of the run, whose first half leads from softmax."""
        targets = self.alpha, self.coefficients
        if self.config.scheme.normalizer == "entmax":
            self.alpha = alpha_at(share, self.alpha)
        elif self.config.scheme.normalizer == "adaptive_softmax":
            self.coefficients = temperature_at(share, self.coefficients)
        try:
            yield
        finally:
            self.alpha, self.coefficients = targets

    def divergence(self, ids: Tensor) -> Tensor:
        """Return KL(teacher || student) in nats per token, for token ids int64 [batch, tokens]."""
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        for added in self.matrices.values():
            added.enabled = False
        with torch.no_grad():
            program, inputs = self.teacher.program, self.teacher.all_inputs(ids, positions)
            hidden = program.evaluate(inputs, [self.teacher.last])[self.teacher.last]
            right = functional.log_softmax(self.teacher.logits(hidden), -1)
        for added in self.matrices.values():
            added.enabled = True
        if self.ssa:
            self.parameters.ssa = torch.stack([parameters() for parameters in self.ssa])
        found = self.decoder.logits(self.decoder.hidden_states(ids, positions, self._attention()))
        divergence = functional.kl_div(functional.log_softmax(found, -1), right, log_target=True, reduction="sum")
        return divergence / ids.numel()

    @torch.no_grad()
    def measure(self, windows: Tensor) -> float:
        """Return the mean of `divergence`, in nats per token, over sequences int64 [n, tokens]."""
        return float(torch.stack([self.divergence(window[None]) for window in windows]).mean())

    def _attention(self) -> AttentionFunction:
        """Return the function that computes the attention of one layer; see `AttentionFunction` for its arguments."""

        def attend(
            _layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            head_params: Tensor | None,
            slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
        ) -> Tensor:
            """Compute attention of a layer by the student's present norm."""
            mixed = normalized_attention(
                *(tensor.transpose(1, 2) for tensor in (query, key, value)),
                norm=self.config.norm,
                alpha=self.alpha if self.config.scheme.normalizer == "entmax" else None,
                head_params=head_params,
                temperature_coefficients=self.coefficients,
                entropy_threshold=self.config.entropy_threshold,
                scale=options.scale_of(self.config),
                softcap=options.softcap_of(self.config),
                causal=True,
                window=options.window,
                alibi_slopes=slopes,
                sinks=options.sinks,
            )
            return mixed.transpose(1, 2)

        return attend

    @torch.no_grad()
    def merge_into(self, module: nn.Module) -> None:
        """Copy the weights with the learned low-rank matrices added into the module's parameters, in place."""
        program = self.teacher.program
        for name, own in program.names.items():
            if own in self.matrices:
                module.get_parameter(name).copy_(getattr(program, own))

    @torch.no_grad()
    def norm_parameters(self) -> dict[str, Tensor]:
        """Return the norm's learned parameters by name, [layers, heads, ...] each, for `sharp.export`; may be empty."""
        names = NAMES.get(self.config.norm, ())
        if self.ssa:
            return dict(zip(names, torch.stack([parameters() for parameters in self.ssa]).unbind(-1), strict=True))
        scales = self.parameters.scales
        return {
            name: torch.stack([scale.get_parameter(PARAMETERS.get(name, name)) for scale in scales]).clone()
            for name in names
        }


def _start(norm: NormDefinition) -> dict[str, Any]:
    """Return start values of the norm's length scale, by parameter, that are near softmax; empty if it has no scale."""
    if norm.scale_kind == "length-bias":
        return {"s": 0.0, "b": 1.0}
    if norm.scale_kind == "head":
        return {"beta": 0.0, "gamma": 1.0}
    if norm.scale_kind == "token":
        return {"w_beta": 0.0, "w_gamma": 0.0, "c_beta": FIRST_BETA, "c_gamma": 0.0}
    return {}


def _identity(module: nn.Module, tokens: Tensor, student: _Student, norm: str, rank: int, recipe: Recipe) -> str:
    """Return all that two runs must share for one to continue the other, as JSON."""
    digest = hashlib.sha256(tokens.numpy().tobytes())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    fields = {"digest": digest.hexdigest(), "norm": norm, "alpha": student.alpha, "rank": rank}
    fields["temperature"] = student.coefficients
    return json.dumps(fields | asdict(recipe), sort_keys=True)


def _train(
    student: _Student,
    tokens: Tensor,
    recipe: Recipe,
    on_step: Callable[[Progress], None],
    folder: Path | None,
    identity: str,
) -> None:
    """Train the student up to the recipe's last step to reproduce its teacher's logits.

    `tokens` are the ids of the text. `on_step` is called after each step. `folder` keeps the state of the training,
    which `identity` tells from other trainings; None keeps none.
    """

    def losses_of(step: int) -> tuple[float, float]:
        """Add the gradients of a step's batch, and return its loss and 0 (there is no loss of hidden states)."""
        with student.at(step / recipe.steps):
            loss = student.divergence(batch_at(recipe, tokens, step))
            loss.backward()  # type: ignore[no-untyped-call] # torch's own has no types
        return loss.item(), 0.0

    learned = student.learned()
    adapters = {name for name in learned if name.startswith("matrices.")}
    descend(learned, adapters, recipe, losses_of, on_step, folder, identity)
