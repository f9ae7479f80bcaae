"""`sharp.export`: any module of PyTorch, from memory to a verified model folder."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from sharp.exporter.checkpoints.norm_options import NormOptions
from sharp.exporter.export import Export, ExportSettings
from sharp.exporter.export import export as export_source
from sharp.exporter.graph.graph_options import GraphOptions
from sharp.exporter.programs.archive import quiet
from sharp.exporter.programs.nodes import is_random, where, where_in
from sharp.exporter.programs.program import Program
from sharp.exporter.programs.reading import ProgramOptions
from sharp.exporter.programs.sizes import random_inputs, roles_of
from sharp.plugins.errors import InputError, VerificationError
from sharp.plugins.manifest import Target

GRAPH = tuple(one.name for one in fields(GraphOptions))
NORM = tuple(one.name for one in fields(NormOptions))
MOST_DIFFERENCE = 1e-3
PROBED = ((1, 1), (2, 7))  # batch and size
ExampleInputs = Tensor | Sequence[Any] | Mapping[str, Any]


def export(
    module: nn.Module | ExportedProgram,
    example_inputs: ExampleInputs = (),
    *,
    norm: str | None = None,
    output: str | Path,
    cache: str = "paged",
    target: Target | None = None,
    tokenizer: str | Path | None = None,
    norm_parameters: Mapping[str, Any] | None = None,
    trained_norm: bool = False,
    untrained_norm: bool = False,
    norm_map: str | Path | None = None,
    text: str | Path | None = None,
    name: str | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> Export:
    """Export a module to a model folder that is verified against the module, as `sharp-export` does with checkpoints.

    The module's attention is found in its graph (torch.export) and gets the norm; nothing else of it changes.

    Args:
        module: in float32. A causal language model takes token ids int64 [batch, tokens] and returns logits float32
            [batch, tokens, vocabulary]; with `cache="none"` any module that attends will do.
        example_inputs: what it is called with, of any size above 1: a tensor, a tuple of arguments or a dict of named
            ones.
        norm: the attention scheme, as for `--norm`; None is the one that is found in the module's graph.
        output: the folder to write; it must be new or empty.
        cache: paged (for sharp-serve), contiguous (for other tools) or none (whole sequences).
        target: who runs the model: onnxruntime, tensorrt or portable; None is onnxruntime, or portable for a norm of a
            user's.
        tokenizer: a tokenizer.json, a folder with one, or "bytes"; None serves token ids only.
        norm_parameters: what the norm has learned, see `NormParameters`; the module then counts as trained with it.
        trained_norm: the module was trained with this norm, although its code shows another.
        untrained_norm: allow a norm that it was not trained with.
        norm_map: a file of other norms for some layers and heads.
        text: the text to measure perplexity on.
        name: of the model; by default that of its class.
        dynamic_shapes: for torch.export; by default every dimension varies that can, of images perhaps only the batch.
        options: dtype, kv_dtype, quantize, block_size, max_context, opset, key_screen (`GraphOptions`); alpha, ssa_b,
            ssa_n, temperature, temperature_coefficients, log_length_offset, length_onset (`NormOptions`). As for
            `sharp-export`.

    Returns:
        What was written and what verification found.

    Raises:
        InputError: the module cannot be exported; the message says which of its lines is in the way.
        VerificationError: the written model differs from the module; the folder is marked as unverified.
    """
    unknown = [one for one in options if one not in (*GRAPH, *NORM)]
    if unknown:
        raise InputError(f"sharp.export has no option {unknown[0]!r}; there are {', '.join((*GRAPH, *NORM))}")
    if isinstance(module, OptimizedModule):  # of torch.compile
        module = module._orig_mod
    if not isinstance(module, nn.Module | ExportedProgram):
        raise InputError(f"module is a {type(module).__name__}, but must be a torch.nn.Module or an ExportedProgram")
    name = name or (type(module).__name__ if isinstance(module, nn.Module) else "program")
    if isinstance(module, nn.Module):
        with evaluated(module):
            exported = trace(module, example_inputs, dynamic_shapes)
            check_traced(module, exported, example_inputs)
    else:
        exported = module
    settings = ExportSettings(
        norm=norm,
        cache=cache,
        target=target,
        norm_map=None if norm_map is None else Path(norm_map),
        norm_options=NormOptions(**{one: options[one] for one in NORM if one in options}),
        untrained_norm=untrained_norm,
        text=None if text is None else Path(text),
        graph=GraphOptions(**{one: options[one] for one in GRAPH if one in options}),
        program=ProgramOptions(
            tokenizer=None if tokenizer is None else str(tokenizer),
            norm_parameters=norm_parameters or {},
            trained=trained_norm,
            exported=exported,
            name=name,
        ),
    )

    def phase(_name: str, _steps: int) -> Callable[[], None]:
        return lambda: None

    result = export_source(Path(name), settings, Path(output), phase, lambda _source: None)
    if result.verification.failure is not None:
        raise VerificationError(f"{result.verification.failure}; {result.folder} is marked as unverified")
    return result


@contextmanager
def evaluated(module: nn.Module) -> Any:
    """Inside, the module is in evaluation and no gradients are kept; afterwards each part is as it was."""
    training = {one: one.training for one in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for one, was in training.items():
            one.training = was


def trace(module: nn.Module, example_inputs: ExampleInputs, dynamic_shapes: Any = None) -> ExportedProgram:
    """The module's program, with every dimension varying that can.

    Raises:
        InputError: torch.export cannot trace it.
    """
    arguments, named = _call_of(example_inputs)
    tensors = [one for one in tree_leaves((arguments, named)) if isinstance(one, Tensor)]
    if not tensors:
        raise InputError("example_inputs is empty; give what the module is called with, as a tuple of tensors")
    if dynamic_shapes is not None:
        return _traced(module, arguments, named, dynamic_shapes)
    first: ExportedProgram | None = None
    failure: InputError | None = None
    dimensions = max(one.dim() for one in tensors)
    for varying in (dimensions, *(one for one in (2, 1) if one < dimensions)):
        try:
            exported = _traced_with(module, arguments, named, varying)
        except InputError as error:
            failure = failure or error
            continue
        if varying <= 2 or _runs_at_other_sizes(exported):  # with learned positions of a grid of patches it does not
            return exported
        first = first or exported
    if first is None:
        assert failure is not None
        raise failure
    return first


def _call_of(inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by place and by name."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def _traced_with(module: nn.Module, arguments: Any, named: Any, varying: int) -> ExportedProgram:
    """With so many dimensions of every tensor varying, where they can."""

    def shape_of(one: Any) -> dict[int, Any] | None:
        return dict.fromkeys(range(min(varying, one.dim())), Dim.AUTO) if isinstance(one, Tensor) else None

    twice = _two_sequences((arguments, named))
    try:
        return _traced(module, twice[0], twice[1], tree_map(shape_of, twice[1] or twice[0]))
    except InputError:
        return _traced(module, arguments, named, tree_map(shape_of, named or arguments))


def _traced(module: nn.Module, arguments: Any, named: Any, dynamic_shapes: Any) -> ExportedProgram:
    try:
        with quiet():
            return torch.export.export(copied(module), arguments, named, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # tracing runs the user's code
        reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
        raise InputError(f"torch.export cannot trace {type(module).__name__}{where_in(error)}: {reason}") from error


def _runs_at_other_sizes(exported: ExportedProgram) -> bool:
    try:
        program = Program(exported)
        roles = roles_of(program)
        for batch, length in PROBED:
            inputs = random_inputs(program, roles, batch, length, torch.Generator().manual_seed(0))
            program.evaluate(dict(zip((port.node for port in program.inputs), inputs, strict=True)), program.outputs)
    except Exception:  # the user's operators raise whatever they raise
        return False
    return True


def copied(module: nn.Module) -> nn.Module:
    """A copy with the very same tensors: what a module keeps of one call, of the tracer's above all, stays in it."""
    tensors = {id(one): one for one in chain(module.parameters(), module.buffers())}
    found: nn.Module = copy.deepcopy(module, tensors)
    for parent in [*found.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, OptimizedModule):  # of torch.compile; its names would be in those of the tensors
                setattr(parent, name, child._orig_mod)
    return found


def _two_sequences(inputs: Any) -> Any:
    """The inputs twice where there is one sequence: the tracer takes a size of 1 for a constant."""
    tensors = [one for one in tree_leaves(inputs) if isinstance(one, Tensor) and one.dim() > 1]
    if not tensors or any(one.shape[0] != 1 for one in tensors):
        return inputs
    return tree_map(
        lambda one: one.repeat(2, *(1,) * (one.dim() - 1)) if isinstance(one, Tensor) and one.dim() > 1 else one, inputs
    )


def check_traced(module: nn.Module, exported: ExportedProgram, example_inputs: ExampleInputs) -> None:
    """Refuse a module whose program computes something else: one that keeps a state, say."""
    arguments, named = _call_of(example_inputs)
    expected = [one for one in tree_leaves(copied(module)(*arguments, **named)) if isinstance(one, Tensor)]
    found = [one for one in tree_leaves(exported.module()(*arguments, **named)) if isinstance(one, Tensor)]
    for one, other in zip(expected, found, strict=True):
        if one.is_floating_point() and not (one - other).abs().max() <= MOST_DIFFERENCE * one.abs().max().clamp(
            min=1e-6
        ):
            raise InputError(
                f"the program that torch.export makes of {type(module).__name__} computes something else"
                f"{_of_chance(exported)}"
            )


def _of_chance(exported: ExportedProgram) -> str:
    node = next((one for one in exported.graph.nodes if is_random(one)), None)
    if node is None:
        return "; it must compute the same whenever it is called, and keep no state"
    return f" every time: {where(node)} is random"
