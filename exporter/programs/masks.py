"""What a graph does between the products of attention, found by evaluating it at several sizes: never by its name.

For logits z = q k the graph computes f(z) before its softmax. f(0) shows the mask and the bias, f of random z the scale
and the soft cap, and that f changes every logit by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.attention_call import AttentionCall
from sharp.exporter.programs.logits import MASKED, between, given_at, logits_of, mask_inputs
from sharp.exporter.programs.program import Program, ProgramInput
from sharp.exporter.programs.sizes import Roles
from sharp.plugins.errors import InputError

TOLERANCE = 1e-4
SMALL = 1e-4  # a logit that no soft cap changes
SIZES = (7, 12)
FUNCTIONS = ("score_mod", "mask_mod")  # of flex_attention
MOST_EVALUATED = 2**26  # logits in float64: 512 MB


@dataclass(frozen=True)
class Logits:
    """What happens to the products of one attention: f(z) = cap(scale z) - slope |distance|, where it is visible.

    `scale` is a number or one for each head; `slopes` are ALiBi's [heads]. `shifted` says that a bias differs from
    ALiBi's by a number in every row, which only a norm that is invariant to that may leave out. `masks` are the inputs
    that say which keys are padding.
    """

    heads: int
    scale: float | Tensor
    softcap: float
    causal: bool
    window: int
    slopes: Tensor | None
    shifted: bool
    masks: tuple[ProgramInput, ...]


def find_masks(program: Program, roles: Roles, calls: list[AttentionCall]) -> dict[str, float]:
    """For every input that is a mask, the value that lets a key be seen.

    Raises:
        InputError: a mask depends on an input that is none, or a mask's shape is not [batch, keys].
    """
    found: dict[str, float] = {}
    for call in calls:
        for port in mask_inputs(program, call):
            if port.name in found:
                continue
            if port.name in roles.vocabularies or (port.dtype.is_floating_point and len(port.shape) > 2):
                raise InputError(
                    f"the mask of attention at {call.where} depends on what is in input {port.name}; Sharp knows masks "
                    "that are causal, sliding windows, ALiBi, or padding by an input of [batch, keys]"
                )
            rows = port.shape[1:-1] if len(port.shape) > 1 else (0,)
            if any(size != 1 for size in rows):
                raise InputError(
                    f"input {port.name}, the mask of attention at {call.where}, must be of shape [batch, keys] to be "
                    "padding; make other masks in the module, from sizes"
                )
            counts = {}
            for value in (0.0, 1.0):
                trial = roles.with_masks({one.name: found.get(one.name, value) for one in mask_inputs(program, call)})
                counts[value] = _visible_keys(program, trial, call)
            found[port.name] = max(counts, key=counts.__getitem__)
    return found


def _visible_keys(program: Program, roles: Roles, call: AttentionCall) -> int:
    given = given_at(program, roles, 2, SIZES[0], padded=False)
    return int((logits_of(program, call, given, 0.0) > MASKED).sum())


def examine(program: Program, roles: Roles, call: AttentionCall, longest: int) -> Logits:
    """What happens to the logits of `call`, tried at sequences of up to `longest` tokens.

    Raises:
        InputError: it is not what Sharp's op computes.
    """
    masks = mask_inputs(program, call)
    found: Logits | None = None
    sizes = SIZES if roles.length is not None else (SIZES[0],)
    for length in sizes:
        given = given_at(program, roles, 2, length, padded=False)
        one = _at_size(program, call, given, masks)
        _check_same(call, found, one)
        found = one
        if masks:
            _check_padding(program, roles, call, length)
    assert found is not None
    if call.by_name and call.arguments["window"] >= 0:
        found = replace(found, window=call.arguments["window"])
    if roles.length is None or (not call.flexible and call.product is None and call.arguments["attn_mask"] is None):
        return found
    for length in _long_sizes(program, call, found.heads, longest):
        base = logits_of(program, call, given_at(program, roles, 1, length, padded=False), 0.0)
        causal, window = _shape_of_mask(call, base > MASKED)
        slopes, shifted = _slopes(call, base)
        if causal != found.causal:
            raise InputError(f"the mask of attention at {call.where} is another at {length} tokens")
        _check_slopes(call, found.slopes, slopes)
        found = replace(found, window=window, shifted=found.shifted or shifted)
    return found


def _long_sizes(program: Program, call: AttentionCall, heads: int, longest: int) -> list[int]:
    """Longer sequences: where a window of some hundreds or thousands, or a table of that size, begins to matter."""
    constants: set[int] = set()
    functions = [program.attributes[str(call.arguments[one].target)] for one in FUNCTIONS] if call.flexible else []
    for node in (*between(call), *(node for one in functions for node in one.graph.nodes)):
        constants |= {one for one in node.args if isinstance(one, int) and not isinstance(one, bool)}
        if node in program.tensors:
            constants |= set(getattr(program, program.tensors[node]).shape)
    most = int((MOST_EVALUATED / heads) ** 0.5)
    needed = {min(longest, one + 5) for one in constants if SIZES[-1] <= one < longest}
    if any(one > most for one in needed):
        raise InputError(
            f"the mask of attention at {call.where} changes at {max(needed) - 5} tokens, and Sharp can evaluate masks "
            f"of {most}; give --max-context of at most that many"
        )
    return sorted({min(longest, 200), *needed})


def _at_size(
    program: Program, call: AttentionCall, given: Mapping[Node, Tensor], masks: tuple[ProgramInput, ...]
) -> Logits:
    base = logits_of(program, call, given, 0.0)
    heads = base.shape[1]
    visible = base > MASKED
    causal, window = _shape_of_mask(call, visible)
    scale, softcap = _scale(program, call, given, base, visible)
    slopes, shifted = _slopes(call, base)
    if softcap and slopes is not None and (logits_of(program, call, given, 1e9) - softcap).abs()[visible].max() < 1e-3:
        raise InputError(f"attention at {call.where} caps its logits after a bias; Sharp's op caps them before")
    return Logits(heads, scale, softcap, causal, window, slopes, shifted, masks)


def _shape_of_mask(call: AttentionCall, visible: Tensor) -> tuple[bool, int]:
    """Whether the mask is causal, and its window or -1."""
    if visible.all():
        return False, -1
    first = visible[0, 0]
    if not (visible == first).all():
        raise InputError(f"the mask of attention at {call.where} differs between sequences or heads")
    queries, keys = first.shape
    distance = torch.arange(keys) - torch.arange(queries)[:, None]
    window = int(first[-1].sum())
    if queries == keys and (first == (distance <= 0)).all():
        return True, -1
    if queries == keys and (first == ((distance <= 0) & (distance > -window))).all():
        return True, window
    raise InputError(
        f"the mask of attention at {call.where} is none that Sharp knows: causal, a sliding window, ALiBi, or padding "
        "by an input of [batch, keys]"
    )


def _scale(
    program: Program, call: AttentionCall, given: Mapping[Node, Tensor], base: Tensor, visible: Tensor
) -> tuple[float | Tensor, float]:
    """The factor of the products, one or for each head, and the soft cap."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(base.shape, generator=generator, dtype=torch.float64) * 3
    found = logits_of(program, call, given, z)
    small = logits_of(program, call, given, SMALL)
    counted = visible.expand_as(base)
    zero = torch.where(counted, base, 0.0)

    def of_head(values: Tensor) -> Tensor:
        first = counted[0, 0].nonzero()[0]
        return torch.where(counted, values, 0.0)[0, :, first[0], first[1]]

    scales = of_head(small - zero) / SMALL  # [heads]
    linear = scales[:, None, None] * z
    change = torch.where(counted, found - zero, 0.0)
    cap = 0.0
    if not _near(change, torch.where(counted, linear, 0.0)):
        caps = of_head(logits_of(program, call, given, 1e9) - zero)
        cap = float(caps[0])
        capped = cap * torch.tanh(linear / cap) if cap > 0 else linear
        if not (cap > 0 and _near(change, torch.where(counted, capped, 0.0))):
            raise InputError(
                f"attention at {call.where} does something to its logits that Sharp's op does not: it may scale them, "
                "cap them by tanh, add ALiBi's bias and mask them"
            )
    if not (scales > 0).all():
        raise InputError(f"attention at {call.where} multiplies its logits by {float(scales.min()):g}")
    if (scales - scales[0]).abs().max() <= 1e-6 * scales[0].abs():
        return float(scales[0]), cap
    return scales.float(), cap


def _slopes(call: AttentionCall, base: Tensor) -> tuple[Tensor | None, bool]:
    """ALiBi's slopes [heads] of a bias, None where there is none; and whether rows are shifted as a whole."""
    visible = base > MASKED
    bias = torch.where(visible, base, 0.0)
    if bias.abs().max() <= 1e-6:
        return None, False
    queries, keys = bias.shape[-2:]
    distance = (torch.arange(keys) - torch.arange(queries)[:, None]).abs().double()
    if not (bias == bias[:1]).all() or queries != keys or queries < 2:
        raise InputError(f"attention at {call.where} adds a bias that is not ALiBi's, which Sharp's op has not")
    own = bias[0]
    last = visible[0, 0, -1].nonzero()[0, 0]
    slopes = (own[:, -1, -1] - own[:, -1, last]) / (keys - 1 - last)  # [heads]
    expected = -slopes[:, None, None] * distance
    rows = own.diagonal(dim1=-2, dim2=-1)[..., None]  # of a key at the query's own place the bias should be 0
    if not _near(torch.where(visible[0], own - rows - expected, 0.0), torch.zeros(()), float(own.abs().max())):
        raise InputError(f"attention at {call.where} adds a bias that is not ALiBi's, which Sharp's op has not")
    return slopes.float(), bool(rows.abs().max() > 1e-6)


def _near(one: Tensor, other: Tensor, largest: float | None = None) -> bool:
    largest = float(other.abs().max()) if largest is None else largest
    return bool((one - other).abs().max() <= TOLERANCE * max(largest, 1e-6))


def _check_same(call: AttentionCall, before: Logits | None, now: Logits) -> None:
    if before is None:
        return
    first, second = torch.as_tensor(before.scale), torch.as_tensor(now.scale)
    if not torch.allclose(first, second, rtol=1e-5) or before.softcap != now.softcap or before.causal != now.causal:
        raise InputError(f"attention at {call.where} treats its logits otherwise when a sequence is longer")
    _check_slopes(call, before.slopes, now.slopes)


def _check_slopes(call: AttentionCall, before: Tensor | None, now: Tensor | None) -> None:
    if (before is None) != (now is None) or (before is not None and not torch.allclose(before, now, rtol=1e-3)):  # type: ignore[arg-type]  # both are there
        raise InputError(f"attention at {call.where} adds a bias that is another when a sequence is longer")


def _check_padding(program: Program, roles: Roles, call: AttentionCall, length: int) -> None:
    """With padding the visible keys are those of before that are no padding."""
    whole = logits_of(program, call, given_at(program, roles, 3, length, padded=False), 0.0) > MASKED
    given = given_at(program, roles, 3, length, padded=True)
    padded = logits_of(program, call, given, 0.0) > MASKED
    seen = torch.ones(padded.shape[0], 1, 1, padded.shape[-1], dtype=torch.bool)
    for port in mask_inputs(program, call):
        seen = seen & (given[port.node] == roles.visible[port.name]).reshape(padded.shape[0], 1, 1, -1)
    if not (padded == (whole & seen)).all():
        raise InputError(
            f"the mask of attention at {call.where} does not hide, for all queries alike, the keys that input "
            f"{', '.join(roles.visible)} marks; Sharp knows masks of padding [batch, keys], and makes others from sizes"
        )
