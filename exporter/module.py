"""The function `sharp.export`, which exports any PyTorch module in memory to a verified model folder."""

import copy
from collections.abc import Mapping, Sequence
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

from sharp.core.errors import InputError, VerificationError
from sharp.core.manifest import Target
from sharp.exporter.export import Export, ExportSettings
from sharp.exporter.export import export as export_source
from sharp.exporter.graph.graph_options import GraphOptions
from sharp.exporter.programs.archive import quiet
from sharp.exporter.programs.nodes import is_random, where, where_in
from sharp.exporter.programs.program import Program
from sharp.exporter.programs.reading import ProgramOptions
from sharp.exporter.programs.sizes import random_inputs, roles_of
from sharp.exporter.sources.norm_options import NormOptions

GRAPH = tuple(option.name for option in fields(GraphOptions))
NORM = tuple(option.name for option in fields(NormOptions))
MOST_DIFFERENCE = 1e-3
PROBED = ((1, 1), (2, 7))  # (batch, size) of the inputs with which a program is tried
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

    The module's attention is found in its graph (torch.export) and gets the norm. Nothing else in the module changes.

    Args:
        module: the module, in float32. A causal language model takes token ids int64 [batch, tokens] and returns logits
            float32 [batch, tokens, vocabulary]. With `cache="none"`, any module with attention can be exported.
        example_inputs: the arguments of a call of the module, of any size above 1: a tensor, a tuple of arguments or a
            dict of named arguments. A batch of 1 is repeated once. Not read if `module` is an ExportedProgram.
        norm: the norm, as for `--norm`; None means the norm that is found in the module's graph.
        output: the folder to write; it must be new or empty.
        cache: paged (for sharp-serve), contiguous (for other tools) or none (whole sequences).
        target: the runtime that runs the model: onnxruntime, tensorrt or portable. None means onnxruntime, or portable
            for a user's own norm.
        tokenizer: a tokenizer.json, a folder with a tokenizer.json, or "bytes"; None serves token ids only.
        norm_parameters: the learned parameters of the norm, see `NormParameters`; the module then counts as trained
            with this norm.
        trained_norm: the module was trained with this norm, although its code shows another.
        untrained_norm: allow a norm that the module was not trained with.
        norm_map: a file of other norms for some layers and heads.
        text: the text to measure perplexity on.
        name: the name of the model; by default the name of its class.
        dynamic_shapes: the dynamic shapes for torch.export; by default every dimension that can vary does. For images
            this may be the batch only. Not read if `module` is an ExportedProgram.
        options: dtype, kv_dtype, quantize, block_size, max_context, opset, key_screen (`GraphOptions`); alpha, ssa_b,
            ssa_n, temperature, temperature_coefficients, log_length_offset, length_onset (`NormOptions`). As for
            `sharp-export`.

    Returns:
        The folder that was written, its manifest, and the result of the verification.

    Raises:
        InputError: the module cannot be exported, and the message names the line of the module that prevents it; or an
            option is unknown or not valid; or `output` is not empty or cannot be made.
        NotFoundError: the tokenizer, the norm map or the text does not exist.
        SharpError: the folder cannot be written.
        VerificationError: the written model differs from the module; the folder is marked as unverified.
    """
    unknown = [option for option in options if option not in (*GRAPH, *NORM)]
    if unknown:
        raise InputError(f"sharp.export has no option {unknown[0]!r}; there are {', '.join((*GRAPH, *NORM))}")
    module = module._orig_mod if isinstance(module, OptimizedModule) else module  # of torch.compile
    exported = _exported(module, example_inputs, dynamic_shapes)
    name = name or (type(module).__name__ if isinstance(module, nn.Module) else "program")
    settings = ExportSettings(
        norm=norm,
        cache=cache,
        target=target,
        norm_map=None if norm_map is None else Path(norm_map),
        norm_options=NormOptions(**{option: options[option] for option in NORM if option in options}),
        untrained_norm=untrained_norm,
        text=None if text is None else Path(text),
        graph=GraphOptions(**{option: options[option] for option in GRAPH if option in options}),
        program=ProgramOptions(
            tokenizer=None if tokenizer is None else str(tokenizer),
            norm_parameters=norm_parameters or {},
            trained=trained_norm,
            exported=exported,
            name=name,
        ),
    )
    result = export_source(Path(name), settings, Path(output), lambda _name, _steps: lambda: None, lambda _source: None)
    if result.verification.failure is not None:
        raise VerificationError(f"{result.verification.failure}; {result.folder} is marked as unverified")
    return result


def _exported(
    module: nn.Module | ExportedProgram, example_inputs: ExampleInputs, dynamic_shapes: Any
) -> ExportedProgram:
    """Return the program of `module`, traced and checked if it is a module.

    Raises:
        InputError: `module` is neither a module nor a program, torch.export cannot trace it, or the program computes
            something else.
    """
    if isinstance(module, ExportedProgram):
        return module
    if not isinstance(module, nn.Module):
        raise InputError(f"module is a {type(module).__name__}, but must be a torch.nn.Module or an ExportedProgram")
    with evaluated(module):
        exported = trace(module, example_inputs, dynamic_shapes)
        check_traced(module, exported, example_inputs)
    return exported


@contextmanager
def evaluated(module: nn.Module) -> Any:
    """Put the module into evaluation mode without gradients inside the context, and restore its modes afterwards."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, was in training.items():
            part.training = was


def trace(module: nn.Module, example_inputs: ExampleInputs, dynamic_shapes: Any = None) -> ExportedProgram:
    """Trace the module to a program, in which every dimension that can vary does. Call it inside `evaluated(module)`.

    If the program that torch.export makes does not run at other sizes, only the first two dimensions of each input
    vary, or only the first. `dynamic_shapes`, as torch.export takes them, replace this choice.

    Raises:
        InputError: torch.export cannot trace the module, or `example_inputs` has no tensor.
    """
    arguments, named = _call_of(example_inputs)
    tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
    if not tensors:
        raise InputError("example_inputs is empty; give what the module is called with, as a tuple of tensors")
    if dynamic_shapes is not None:
        return _traced(module, arguments, named, dynamic_shapes)
    first: ExportedProgram | None = None
    failure: InputError | None = None
    dimensions = max(tensor.dim() for tensor in tensors)
    for varying in (dimensions, *(fewer for fewer in (2, 1) if fewer < dimensions)):
        try:
            exported = _traced_with(module, arguments, named, varying)
        except InputError as error:
            failure = failure or error
            continue
        # A program may fail at other sizes although it was traced, for example with learned positions of image patches.
        if varying <= 2 or _runs_at_other_sizes(exported):
            return exported
        first = first or exported
    if first is None:
        assert failure is not None
        raise failure
    return first


def _call_of(inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments of a call with `inputs`."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def _traced_with(module: nn.Module, arguments: Any, named: Any, varying: int) -> ExportedProgram:
    """Trace the module with the first `varying` dimensions of every tensor dynamic, where this is possible.

    `arguments` and `named` are the example inputs by position and by name.
    """

    def shape_of(one: Any) -> dict[int, Any] | None:
        """Return an argument's dynamic dimensions for torch.export; None if it is no tensor."""
        return dict.fromkeys(range(min(varying, one.dim())), Dim.AUTO) if isinstance(one, Tensor) else None

    twice = _two_sequences((arguments, named))
    try:
        return _traced(module, twice[0], twice[1], tree_map(shape_of, twice[1] or twice[0]))
    except InputError:
        return _traced(module, arguments, named, tree_map(shape_of, named or arguments))


def _traced(module: nn.Module, arguments: Any, named: Any, dynamic_shapes: Any) -> ExportedProgram:
    """Export a copy of the module with torch.export; the arguments are those of `torch.export.export`.

    Raises:
        InputError: the module cannot be traced; the message names the line of the user's code.
    """
    try:
        with quiet():
            return torch.export.export(copied(module), arguments, named, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # tracing runs the user's code
        reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
        raise InputError(f"torch.export cannot trace {type(module).__name__}{where_in(error)}: {reason}") from error


def _runs_at_other_sizes(exported: ExportedProgram) -> bool:
    """Whether the program runs with random inputs of all sizes (batch, length) in `PROBED`."""
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
    """Return a copy of the module that shares its tensors, without the wrappers of torch.compile around its children.

    State that a module keeps from a call, such as a call by the tracer, then stays in the copy.
    """
    tensors = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    found: nn.Module = copy.deepcopy(module, tensors)
    for parent in [*found.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, OptimizedModule):  # torch.compile's wrapper would add its name to those of the tensors
                setattr(parent, name, child._orig_mod)
    return found


def _two_sequences(inputs: Any) -> Any:
    """Repeat inputs with a batch of 1 to a batch of 2, because the tracer takes a size of 1 for a constant."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    if not tensors or any(tensor.shape[0] != 1 for tensor in tensors):
        return inputs
    return tree_map(
        lambda one: one.repeat(2, *(1,) * (one.dim() - 1)) if isinstance(one, Tensor) and one.dim() > 1 else one, inputs
    )


def check_traced(module: nn.Module, exported: ExportedProgram, example_inputs: ExampleInputs) -> None:
    """Check that a program computes what its module does. Call it inside `evaluated(module)`.

    Raises:
        InputError: an output differs by more than 0.001 of its largest number, for example because the module keeps a
            state or is random.
    """
    arguments, named = _call_of(example_inputs)
    expected = [leaf for leaf in tree_leaves(copied(module)(*arguments, **named)) if isinstance(leaf, Tensor)]
    found = [leaf for leaf in tree_leaves(exported.module()(*arguments, **named)) if isinstance(leaf, Tensor)]
    for own, other in zip(expected, found, strict=True):
        if own.is_floating_point() and not (own - other).abs().max() <= MOST_DIFFERENCE * own.abs().max().clamp(
            min=1e-6
        ):
            raise InputError(
                f"the program that torch.export makes of {type(module).__name__} computes something else"
                f"{_of_chance(exported)}"
            )


def _of_chance(exported: ExportedProgram) -> str:
    """Return the end of a message about outputs that differ: it names the random node, if one is found."""
    node = next((random for random in exported.graph.nodes if is_random(random)), None)
    if node is None:
        return "; it must compute the same whenever it is called, and keep no state"
    return f" every time: {where(node)} is random"
