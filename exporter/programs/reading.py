"""The reader of programs, which finds the attention, chooses the norm, and compares both with the program itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from sharp.core.errors import InputError, SharpError
from sharp.exporter.programs.archive import load_program
from sharp.exporter.programs.attention_call import OwnNorm
from sharp.exporter.programs.decoder import ProgramDecoder, find_positions, not_a_decoder
from sharp.exporter.programs.layers import AttentionLayers, find_layers
from sharp.exporter.programs.masks import check_shift
from sharp.exporter.programs.memory_limit import memory_of_program
from sharp.exporter.programs.model import ProgramModel
from sharp.exporter.programs.nodes import is_random, where
from sharp.exporter.programs.norm_parameters import NormParameters
from sharp.exporter.programs.positions import PositionTable, longest_sequence
from sharp.exporter.programs.program import MOST_LENGTH, Program, Values
from sharp.exporter.programs.sizes import Roles, random_inputs, roles_of
from sharp.exporter.programs.tokenizers import ProgramTokenizer, read_tokenizer
from sharp.exporter.programs.unrecognised import unrecognised_attention
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.imported_config import ImportedConfig
from sharp.exporter.sources.norm_options import NO_OPTIONS, NormOptions
from sharp.exporter.sources.source import Source, sha256
from sharp.exporter.sources.uncached_model import UncachedDecoder, UncachedModel
from sharp.exporter.sources.unknown_keys import UnusedKeys
from sharp.models.attention import EagerAttention
from sharp.models.config import SharpConfig
from sharp.models.norms import NORMS, get_norm

DEFAULT_LONGEST = 4096  # tokens, if neither the program nor the user sets a limit
SIZES = ((2, 7), (1, 12), (3, 33))  # batch and tokens at which attention is compared
MOST_DIFFERENCE = 1e-3  # share of the largest output; a wrong attention changes the output by far more
SPARSEMAX = 2.0  # entmax's alpha that is sparsemax
NORMS_OF_OP = {
    "softmax": "softmax",
    "adaptive_softmax": "adaptive-temperature",
    "entmax": "entmax",
    "ssa": "ssa",
    "sigmoid": "sigmoid",
    "relu": "relu",
    "relu2": "relu2",
    "softpick": "softpick",
}


@dataclass(frozen=True)
class ProgramOptions:
    """Options of the user for facts that a program itself does not contain.

    `tokenizer` is a file, a folder or "bytes"; `norm_parameters` are for `NormParameters`. `trained` says that the
    model was trained with the chosen norm although its graph shows another. `max_context` is the longest sequence in
    tokens; None means 4096, or less if the program limits it. `exported` is the program if it is not in a file. `name`
    is that of the model; None means the name of the file.
    """

    tokenizer: str | None = None
    norm_parameters: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False
    max_context: int | None = None
    exported: ExportedProgram | None = None
    name: str | None = None

    def check_unused(self, path: Path) -> None:
        """Check that no `norm_parameters` are given with the checkpoint at `path`, which is no program.

        Other options are not checked.

        Raises:
            InputError: `norm_parameters` are given.
        """
        if self.norm_parameters:
            raise InputError(
                f"--norm-parameter is for programs of torch.export (.pt2), and {path} has its own; leave it out"
            )


NO_PROGRAM_OPTIONS = ProgramOptions()


def read_program(
    path: Path,
    norm: str | None,
    options: NormOptions = NO_OPTIONS,
    given: ProgramOptions = NO_PROGRAM_OPTIONS,
) -> Source:
    """Read a program (`.pt2`), to be exported with `norm` (None: its own), set up with `options`.

    If `given.exported` is None, `path` must exist. Otherwise `path` is only the name of the program in messages. If the
    program is no decoder, the source's model is a `ProgramModel` over whole sequences, and `no_cache` says why.

    Raises:
        NotFoundError: the tokenizer or the file of temperature coefficients does not exist.
        InputError: the program cannot be read or run, Sharp's op cannot compute its attention, or the norm, an option
            or the tokenizer does not fit it.
    """
    if norm is not None:
        options.check(norm)
    if given.exported is not None:
        return _read_any(path, given.exported, norm, options, given, None)
    with memory_of_program(path.stat().st_size):
        return _read_any(path, load_program(path), norm, options, given, sha256([path]))


def _read_any(
    path: Path,
    exported: ExportedProgram,
    norm: str | None,
    options: NormOptions,
    given: ProgramOptions,
    digest: str | None,
) -> Source:
    """Read an exported program as `_read` does, and begin the message of each InputError with `path`."""
    try:
        with torch.no_grad():
            return _read(path, Program(exported), norm, options, given, digest)
    except InputError as error:
        raise InputError(f"{path} cannot be exported: {error}") from error
    except SharpError:  # such as NotFoundError of a tokenizer that does not exist
        raise
    except Exception as error:  # operators of the program may raise anything
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            reason = "it takes more memory than there is, or than a program of its size has a use for"
        elif isinstance(error, RuntimeError):
            reason += "; sizes that it needs must be fixed when it is exported (dynamic_shapes)"
        at = next((f" at {note}" for note in getattr(error, "__notes__", ())), "")
        raise InputError(f"{path} cannot be exported, as its program does not run{at}: {reason}") from error


def _read(
    path: Path,
    program: Program,
    norm: str | None,
    options: NormOptions,
    given: ProgramOptions,
    digest: str | None,
) -> Source:
    """Return the source of an export: the program with its attention recognised, as a decoder or as an uncached model.

    `norm` None keeps the program's own. `digest` is the SHA-256 of the file, None if there is no file.

    Raises:
        InputError: the program has no attention that Sharp recognises, or is random.
    """
    output = _output(program)
    _check_certain(program, output)
    roles = roles_of(program)
    longest = min(given.max_context or DEFAULT_LONGEST, program.longest.get(roles.length or "", MOST_LENGTH))
    roles, attention = find_layers(program, roles, longest)
    refusal, tables = not_a_decoder(program, roles, attention, output), list[PositionTable]()
    if refusal is None:
        try:
            tables, longest = find_positions(program, roles, attention, output, longest)
        except InputError as error:
            calls = [layer.call for layer in attention.layers]
            refusal = unrecognised_attention(program, roles, calls) or str(error)
    if refusal is not None:
        longest = _longest_runs(program, roles, longest)
    attention = attention.within(longest)
    own_norm, own_alpha = _own_norm(attention)
    config = _config(attention, output, longest, own_norm, own_alpha, causal=refusal is None)

    def made(config: SharpConfig, parameters: NormParameters, *, own: bool) -> Decoder | UncachedModel:
        """Return the model of this config: a decoder, or an uncached model if a decoder was refused."""
        if refusal is not None:
            return ProgramModel(program, roles, attention, output, config, parameters, own=own).eval()
        return ProgramDecoder(program, roles, attention, output, config, parameters, tables, own=own).eval()

    original = made(config, NormParameters.of_program(config), own=True)
    _check_last_token(original, program, output)
    _check_own_attention(original, program, output)
    tokenizer = None if given.tokenizer is None else read_tokenizer(given.tokenizer, config.vocab_size)
    options.check(norm or own_norm)
    own_options = replace(options, alpha=None) == NO_OPTIONS and options.alpha in (None, config.alpha)
    if norm in (None, own_norm) and own_norm == "ssa" and (options.ssa_b is None) != (options.ssa_n is None):
        raise InputError("it has b and n of its own in every head; give both --ssa-b and --ssa-n, or neither")
    if norm in (None, own_norm) and own_options and not given.norm_parameters:
        model = original = _with_tokenizer(original, tokenizer)
    else:
        model = made(*with_norm(program, attention, config, norm or own_norm, options, given), own=False)
        model = _with_tokenizer(model, tokenizer)
        original = _with_tokenizer(original, tokenizer)
    trained = model is original or given.trained or bool(given.norm_parameters)
    return Source(
        name=given.name or path.stem,
        architecture=given.name or "ExportedProgram",
        sha256=digest or program.sha256(),
        model=model,
        original=model if trained else original,
        write_tokenizer=None if tokenizer is None else tokenizer.write,
        no_cache=refusal,
        unused=(UnusedKeys("weights that its code does not read", program.unread),),
    )


def with_norm(
    program: Program,
    attention: AttentionLayers,
    config: SharpConfig,
    norm: str,
    options: NormOptions,
    given: ProgramOptions,
) -> tuple[SharpConfig, NormParameters]:
    """Return the configuration and the parameters of a norm that the program itself does not have.

    `config` is that of the program under its own norm. `options` and `given.norm_parameters` set up the norm.

    Raises:
        NotFoundError: the file of temperature coefficients does not exist.
        InputError: the program's attention cannot have the norm, or parameters are missing or have other shapes.
    """
    scheme = get_norm(norm)
    if norm == "fixed-temperature" and options.temperature is None:
        raise InputError("it was not trained with a fixed temperature; say which (temperature)")
    capped = next((layer for layer in attention.layers if layer.logits.softcap), None)
    if capped is not None and scheme.scale_kind != "none":
        raise InputError(
            f"attention at {capped.call.where} caps its logits at {capped.logits.softcap:g}, and norm {norm} would "
            "scale them before that; choose another --norm"
        )
    for layer in attention.layers:
        check_shift(layer.call, layer.logits, scheme.normalizer)
    chosen = replace(config, norm=norm, **({"alpha": scheme.alpha} | options.config_fields()))
    tensors = {name: getattr(program, own) for name, own in program.names.items()}
    if scheme.scale_kind == "token":
        chosen = replace(chosen, hidden_size=attention.hidden_size)
    parameters = NormParameters(chosen, given.norm_parameters, tensors)
    parameters.fill(options.ssa_b, options.ssa_n)
    options.apply(parameters)
    return chosen, parameters


def _longest_runs(program: Program, roles: Roles, most: int) -> int:
    """Return the longest sequence, up to `most`, that the program's tables of positions are for."""
    nodes = [
        node
        for node in program.graph.nodes
        if node not in program.data
        and node not in program.tensors
        and isinstance(value := node.meta.get("val"), Tensor)
        and [str(size) for size in value.shape].count(str(roles.length)) == 1
    ]

    def given_at(batch: int, length: int) -> Values:
        """Return random inputs for `batch` sequences of `length` tokens, by node."""
        inputs = random_inputs(program, roles, batch, length, torch.Generator().manual_seed(0))
        return {port.node: tensor for port, tensor in zip(program.inputs, inputs, strict=True)}

    return longest_sequence(program, given_at, nodes, most)


def _output(program: Program) -> Node:
    """Return the output to export: the first of floats with at least two dimensions.

    Raises:
        InputError: there is no such output.
    """
    for node in program.outputs:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return node
    raise InputError("it returns no tensor of floats with two dimensions or more")


def _check_certain(program: Program, output: Node) -> None:
    """Check that no node that the output needs is random, else raise InputError."""
    for node in program.needed({}, [output], {}):
        if is_random(node):
            raise InputError(
                f"{where(node)} is random; leave it out, and call eval() before torch.export if it is dropout"
            )


def _own_norm(attention: AttentionLayers) -> tuple[str, float | None]:
    """Return the name of the norm of the program's own attention, and its alpha (None unless it is of entmax's kind).

    Raises:
        InputError: the layers differ in their norm.
    """
    norms = [layer.call.norm for layer in attention.layers]
    first = norms[0]
    for layer, norm in zip(attention.layers, norms, strict=True):
        if (norm.normalizer, norm.alpha, norm.temperature_coefficients) != (
            *(first.normalizer, first.alpha, first.temperature_coefficients),
        ):
            raise InputError(
                f"its layers differ in their norm: attention at {layer.call.where} has {_described(norm)}, and the "
                f"first {_described(first)}; export it with one, and --norm-map for the others"
            )
    if first.normalizer == "entmax" and first.alpha == SPARSEMAX:
        return "sparsemax", first.alpha
    with_constants = (
        scheme for scheme in NORMS.values() if scheme.normalizer == first.normalizer and scheme.head_constants
    )
    for scheme in with_constants:
        constants = torch.tensor(scheme.head_constants)
        if all(norm.head_params is not None and (norm.head_params == constants).all() for norm in norms):
            return scheme.name, first.alpha
    return NORMS_OF_OP.get(first.normalizer, first.normalizer), first.alpha  # a user's normalizer is its own norm


def _described(norm: OwnNorm) -> str:
    """Return the normalizer's name, with its alpha for entmax."""
    return norm.normalizer if norm.alpha is None else f"{norm.normalizer} of alpha {norm.alpha:g}"


def _config(
    attention: AttentionLayers,
    output: Node,
    longest: int,
    norm: str,
    alpha: float | None,
    *,
    causal: bool,
) -> SharpConfig:
    """Return the program's config. The vocabulary is the output's last size, the context `longest` tokens.

    `alpha` is that of entmax, None for another norm, and `causal` whether tokens see earlier tokens only.
    """
    first = attention.first
    width = output.meta["val"].shape[-1]
    hidden = first.q_heads * first.head_dim
    facts: dict[str, Any] = {} if alpha is None else {"alpha": alpha}
    if first.call.norm.temperature_coefficients is not None:
        facts["temperature_coefficients"] = first.call.norm.temperature_coefficients
        facts["entropy_threshold"] = first.call.norm.entropy_threshold
    return ImportedConfig(
        vocab_size=width if isinstance(width, int) else 1,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        layers=len(attention.layers),
        q_heads=first.q_heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        value_size=first.value_dim,
        norm=norm,
        positions="none",
        trained_context=longest,
        max_context=longest,
        causal=causal,
        **facts,
    )


def _with_tokenizer(model: Decoder | UncachedModel, tokenizer: ProgramTokenizer | None) -> Decoder | UncachedModel:
    """Set the special tokens of the tokenizer, if there is one, in the model's config; return the model."""
    if tokenizer is not None:
        model.config = replace(model.config, bos_token_id=tokenizer.bos, eos_token_ids=tokenizer.eos)
    return model


def _check_last_token(original: Decoder | UncachedModel, program: Program, output: Node) -> None:
    """Refuse a decoder that has logits for more tokens than embeddings: it could not read what it generates.

    Raises:
        InputError: the program fails to read its last token.
    """
    if not isinstance(original, ProgramDecoder):
        return
    last = original.config.vocab_size - 1
    tokens = torch.full((2, 2), last)
    try:
        program.evaluate(original.all_inputs(tokens, torch.arange(2).expand(2, 2)), [output])
    except IndexError as error:
        raise InputError(
            f"it has logits for {last + 1} tokens and fails where it reads the last of them: it has fewer embeddings, "
            "so that it cannot read all that it generates; give it as many"
        ) from error


def _check_own_attention(original: Decoder | UncachedModel, program: Program, output: Node) -> None:
    """Refuse a program whose output changes when the recognised attention replaces its own.

    Raises:
        InputError: the output differs by more than 0.001 of its largest number.
    """
    model = UncachedDecoder(original) if isinstance(original, Decoder) else original
    for batch, length in SIZES:
        inputs = model.random_inputs(batch, min(length, model.config.max_context), torch.Generator().manual_seed(batch))
        found = model.compute(EagerAttention(model.config), *inputs)
        if isinstance(original, ProgramDecoder):
            positions = torch.arange(inputs[0].shape[1]).expand_as(inputs[0])
            values = program.evaluate(original.all_inputs(inputs[0], positions), [output])
            own: Tensor = values[output]
            found = found[:, -own.shape[1] :]  # a program may return logits of the last token only
        else:
            own = program.output(inputs, output)
        error = float((found - own).abs().max() / own.abs().max().clamp(min=1e-6))
        if not error <= MOST_DIFFERENCE:
            at = _first_different(original, program, output)
            raise InputError(
                f"with the attention that was recognised{at} its output differs by {error:.0e} of the largest from its "
                "own; call sharp.models.normalized_attention where it attends"
            )


def _first_different(original: Decoder | UncachedModel, program: Program, output: Node) -> str:
    """Return " (PLACE)", the place of the first attention that changes the output when it alone is replaced.

    The text is for a message; it is empty if no attention changes the output. `original` must be a `ProgramDecoder` or
    a `ProgramModel`.
    """
    assert isinstance(original, ProgramDecoder | ProgramModel)
    whole = ProgramModel(
        program,
        original.roles,
        original.attention,
        output,
        original.config,
        original.parameters_of_norm,
        own=True,
    )
    inputs = whole.random_inputs(*SIZES[0], torch.Generator().manual_seed(0))
    right = program.output(inputs, output)
    for number, layer in enumerate(original.attention.layers):
        found = whole.compute(EagerAttention(original.config), *inputs, only=number)
        if not (found - right).abs().max() <= MOST_DIFFERENCE * right.abs().max():
            return f" ({layer.call.where})"
    return ""
