"""The mask, bias, scale and soft cap of attention, found by evaluating the graph at several sizes, never by names.

For logits z = q k the graph computes f(z) before its softmax. f(0) shows the mask and the bias, f of random z the scale
and the soft cap, and that f changes every logit by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from sharp.core.errors import InputError
from sharp.exporter.programs.attention_call import AttentionCall
from sharp.exporter.programs.logits import MASKED, between, given_at, logits_of, mask_inputs
from sharp.exporter.programs.program import Program, ProgramInput
from sharp.exporter.programs.sizes import Roles
from sharp.exporter.programs.weighting import hides

TOLERANCE = 1e-4
SMALL = 1e-4  # a logit that no soft cap changes
SPREADS = (1.0, 20.0)  # standard deviations of random logits; clipping of logits shows at the second
SIZES = (7, 12)
SHIFT_INVARIANT = ("softmax", "adaptive_softmax", "entmax")
FUNCTIONS = ("score_mod", "mask_mod")  # the arguments of flex_attention that are functions
LEAST_OF_MASK = -10.0  # a bias of two values, one of them below this, is meant as a mask
MOST_EVALUATED = 2**26  # logits in float64: 512 MB


@dataclass(frozen=True)
class Logits:
    """The function of the products z of one attention: f(z) = cap(scale z) - slope |distance| for visible keys.

    `scale` is a number or a tensor [heads]; cap(x) is `softcap` tanh(x / `softcap`), or x if `softcap` is 0; `slopes`
    are ALiBi's [heads], None without a bias. `window` is -1 without a sliding window. `shifted` says that the bias
    differs from ALiBi's by a number in every row, which only a shift-invariant norm may ignore. `masks` are the inputs
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
    """Return the value that marks visible keys, 0 or 1, for every input that is a mask, by the name of the input.

    Raises:
        InputError: a mask depends on token ids or on floats of three dimensions or more, or has more rows than one for
            each sequence: its shape must be [keys], [batch, keys] or [batch, 1, ..., keys].
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
                trial = roles.with_masks(
                    {mask.name: found.get(mask.name, value) for mask in mask_inputs(program, call)}
                )
                counts[value] = _visible_keys(program, trial, call)
            found[port.name] = max(counts, key=counts.__getitem__)
    return found


def _visible_keys(program: Program, roles: Roles, call: AttentionCall) -> int:
    """Return how many (query, key) pairs are visible in two sequences of the smallest test length."""
    return int(_visible(program, call, given_at(program, roles, 2, SIZES[0], padded=False))[1].sum())


def _visible(program: Program, call: AttentionCall, given: Mapping[Node, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits of products that all are 0, and which keys are masked neither before, in nor after the norm."""
    base = logits_of(program, call, given, 0.0)
    visible = base > MASKED
    if call.written_out is not None:
        visible = visible & ~hides(program, call, given, base)
    return base, visible


def examine(program: Program, roles: Roles, call: AttentionCall, longest: int) -> Logits:
    """Return the function of the logits of `call`, evaluated at sequences of up to `longest` tokens.

    Raises:
        InputError: Sharp's op does not compute this function.
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
    check_shift(call, found, call.norm.normalizer)
    if roles.length is None or (not call.flexible and call.written_out is None and call.arguments["attn_mask"] is None):
        return found
    for length in _long_sizes(program, call, found.heads, longest):
        base, visible = _visible(program, call, given_at(program, roles, 1, length, padded=False))
        causal, window = _shape_of_mask(call, visible)
        slopes, shifted = _slopes(call, base, visible)
        if causal != found.causal:
            raise InputError(f"the mask of attention at {call.where} is another at {length} tokens")
        _check_slopes(call, found.slopes, slopes)
        found = replace(found, window=window, shifted=found.shifted or shifted)
    check_shift(call, found, call.norm.normalizer)
    return found


def check_shift(call: AttentionCall, logits: Logits, normalizer: str) -> None:
    """Check that no number is added to all logits of a row, unless the normalizer is invariant to that.

    Raises:
        InputError: a number is added, and it changes the weights.
    """
    if logits.shifted and normalizer not in SHIFT_INVARIANT:
        raise InputError(
            f"attention at {call.where} adds a number to all logits of a row, which softmax does not see and "
            f"{normalizer} does; leave the number out, and of ALiBi's bias subtract slope * position of the query there"
        )


def _long_sizes(program: Program, call: AttentionCall, heads: int, longest: int) -> list[int]:
    """Return the longer lengths to evaluate: just above every constant that may be a window or the size of a table.

    `heads` is the number of query heads; evaluation takes at most `longest` tokens.

    Raises:
        InputError: a mask changes only at a length that is too large to evaluate.
    """
    constants: set[int] = set()
    functions = [program.attributes[str(call.arguments[name].target)] for name in FUNCTIONS] if call.flexible else []
    for node in (*between(call), *(node for function in functions for node in function.graph.nodes)):
        constants |= {
            argument for argument in node.args if isinstance(argument, int) and not isinstance(argument, bool)
        }
        if node in program.tensors:
            constants |= set(getattr(program, program.tensors[node]).shape)
    most = int((MOST_EVALUATED / heads) ** 0.5)
    needed = {min(longest, constant + 5) for constant in constants if SIZES[-1] <= constant < longest}
    if any(length > most for length in needed):
        raise InputError(
            f"the mask of attention at {call.where} changes at {max(needed) - 5} tokens, and Sharp can evaluate masks "
            f"of {most}; give --max-context of at most that many"
        )
    return sorted({min(longest, 200), *needed})


def _at_size(
    program: Program, call: AttentionCall, given: Mapping[Node, Tensor], masks: tuple[ProgramInput, ...]
) -> Logits:
    """Return what the graph does to the logits at inputs `given`. InputError if the op cannot do it."""
    base, visible = _visible(program, call, given)
    heads = base.shape[1]
    causal, window = _shape_of_mask(call, visible)
    scale, softcap = _scale(program, call, given, base, visible)
    slopes, shifted = _slopes(call, base, visible)
    if softcap and slopes is not None and (logits_of(program, call, given, 1e9) - softcap).abs()[visible].max() < 1e-3:
        raise InputError(f"attention at {call.where} caps its logits after a bias; Sharp's op caps them before")
    return Logits(heads, scale, softcap, causal, window, slopes, shifted, masks)


def _shape_of_mask(call: AttentionCall, visible: Tensor) -> tuple[bool, int]:
    """Return whether the mask is causal, and its window or -1.

    Raises:
        InputError: the mask is another, or differs between sequences or heads.
    """
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
    """Return the factor of the products, a number or a tensor [heads], and the soft cap or 0.

    `base` and `visible` are [batch, heads, queries, keys]: the logits if all products are 0, and which keys are
    visible.

    Raises:
        InputError: the factor of a head is not above 0, or the logits are no scaled or capped products.
    """
    small = logits_of(program, call, given, SMALL)
    counted = visible.expand_as(base)
    zero = torch.where(counted, base, 0.0)

    def of_head(values: Tensor) -> Tensor:
        """Return each head's value [heads] at the first counted query and key."""
        first = counted[0, 0].nonzero()[0]
        return torch.where(counted, values, 0.0)[0, :, first[0], first[1]]

    slopes = torch.where(counted, small - zero, 0.0) / SMALL
    _check_queries(call, slopes, counted)
    scales = of_head(small - zero) / SMALL  # [heads]
    if not (scales > 0).all():
        raise InputError(
            f"attention at {call.where} multiplies its logits by {float(scales.min()):g}, and Sharp's op by numbers "
            "above 0; multiply the query by it instead, before the product with the keys"
        )
    random = torch.randn(base.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def same_as(function: Callable[[Tensor], Tensor]) -> bool:
        """Whether the graph computes `function` of scaled products, both small and large."""
        return all(
            _near(
                torch.where(counted, logits_of(program, call, given, z) - zero, 0.0),
                torch.where(counted, function(scales[:, None, None] * z), 0.0),
            )
            for z in (random / scales[0] * size for size in SPREADS)
        )

    cap = 0.0
    if not same_as(lambda logits: logits):
        cap = float(of_head(logits_of(program, call, given, 1e9) - zero)[0])
        if not (cap > 0 and same_as(lambda logits: cap * torch.tanh(logits / cap))):
            _check_written_over(call, base, logits_of(program, call, given, random), visible)
            raise InputError(
                f"attention at {call.where} does something to its logits that Sharp's op does not: it may scale them, "
                "cap them by tanh, add ALiBi's bias and mask them; leave the rest out, or call "
                "sharp.models.normalized_attention"
            )
    if (scales - scales[0]).abs().max() <= 1e-6 * scales[0].abs():
        return float(scales[0]), cap
    return scales.float(), cap


def _check_queries(call: AttentionCall, slopes: Tensor, counted: Tensor) -> None:
    """Refuse logits with a factor for each query, such as the logarithm of its position.

    `slopes` has the factor of every logit, [batch, heads, queries, keys], which `counted` marks as visible.
    """
    of_rows = slopes.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
    same_in_row = _near(slopes, torch.where(counted, of_rows, 0.0))
    if same_in_row and not _near(of_rows, torch.where(counted.any(-1, keepdim=True), of_rows[:, :, -1:], 0.0)):
        raise InputError(
            f"attention at {call.where} multiplies its logits by a number for each query; multiply the query by it "
            "instead, before the product with the keys: (q * factor[:, None]) @ k.transpose(-2, -1)"
        )


def _check_written_over(call: AttentionCall, base: Tensor, found: Tensor, visible: Tensor) -> None:
    """Raise InputError if a mask writes a small number, such as -50, over visible logits and so hides no key.

    `base` are the logits [batch, heads, queries, keys] if all products are 0, and `found` those of random products.
    """
    written_over = visible & (found == base) & (base <= LEAST_OF_MASK)
    if written_over.any():
        raise InputError(
            f"attention at {call.where} writes {float(base[written_over][0]):g} over some logits, which hides no key; "
            "if that is a mask, write it as z.masked_fill(~mask, float('-inf'))"
        )


def _slopes(call: AttentionCall, base: Tensor, visible: Tensor) -> tuple[Tensor | None, bool]:
    """Return ALiBi's slopes [heads] of a bias, None without a bias; and whether whole rows are shifted.

    `base` and `visible` are [batch, heads, queries, keys]: the logits if all products are 0, and which keys are
    visible.

    Raises:
        InputError: the bias is not ALiBi's.
    """
    bias = torch.where(visible, base, 0.0)
    if bias.abs().max() <= 1e-6:
        return None, False
    queries, keys = bias.shape[-2:]
    distance = (torch.arange(keys) - torch.arange(queries)[:, None]).abs().double()
    if not (bias == bias[:1]).all() or queries != keys or queries < 2:
        raise InputError(
            f"attention at {call.where} adds a bias that is not ALiBi's, which Sharp's op has not; use ALiBi or none"
        )
    own = bias[0]
    last = visible[0, 0, -1].nonzero()[0, 0]
    slopes = (own[:, -1, -1] - own[:, -1, last]) / (keys - 1 - last)  # [heads]
    expected = -slopes[:, None, None] * distance
    rows = own.diagonal(dim1=-2, dim2=-1)[..., None]  # the bias of the query's own position, which is 0 in ALiBi
    if not _near(torch.where(visible[0], own - rows - expected, 0.0), torch.zeros(()), float(own.abs().max())):
        raise InputError(
            f"attention at {call.where} adds a bias that is not ALiBi's, which Sharp's op has not{_if_mask(own)}"
        )
    return slopes.float(), bool(rows.abs().max() > 1e-6)


def _if_mask(bias: Tensor) -> str:
    """Return advice for a message if the bias has only two values, as a mask; otherwise ""."""
    if bias.unique().numel() != 2 or bias.min() > LEAST_OF_MASK:
        return ""
    return f"; if its {float(bias.min()):.4g} is a mask, write z.masked_fill(~mask, float('-inf')) before the norm"


def _near(one: Tensor, other: Tensor, largest: float | None = None) -> bool:
    """Whether two tensors differ by at most `TOLERANCE` times `largest`, by default the second's largest value."""
    largest = float(other.abs().max()) if largest is None else largest
    return bool((one - other).abs().max() <= TOLERANCE * max(largest, 1e-6))


def _check_same(call: AttentionCall, before: Logits | None, now: Logits) -> None:
    """Check that the logits are treated alike at two lengths, else raise InputError.

    `before` is None at the first length.
    """
    if before is None:
        return
    first, second = torch.as_tensor(before.scale), torch.as_tensor(now.scale)
    if not torch.allclose(first, second, rtol=1e-5) or before.softcap != now.softcap or before.causal != now.causal:
        raise InputError(
            f"attention at {call.where} treats its logits otherwise when a sequence is longer; let their factor, cap "
            "and mask depend on the position of the query, and not on the length of the whole sequence"
        )
    _check_slopes(call, before.slopes, now.slopes)


def _check_slopes(call: AttentionCall, before: Tensor | None, now: Tensor | None) -> None:
    """Check that ALiBi slopes [heads] are equal at two lengths, or absent at both; else raise InputError."""
    if (before is None) != (now is None) or (before is not None and not torch.allclose(before, now, rtol=1e-3)):  # type: ignore[arg-type]  # neither is None here
        raise InputError(
            f"attention at {call.where} adds a bias that is another when a sequence is longer; compute it alike "
            "at all lengths"
        )


def _check_padding(program: Program, roles: Roles, call: AttentionCall, length: int) -> None:
    """Check that padding hides exactly the padded keys and leaves the visibility of all others unchanged.

    The mask is computed for three sequences of `length` tokens, with and without padding.

    Raises:
        InputError: padding hides other keys, or not the same keys for all queries.
    """
    _, whole = _visible(program, call, given_at(program, roles, 3, length, padded=False))
    given = given_at(program, roles, 3, length, padded=True)
    _, padded = _visible(program, call, given)
    seen = torch.ones(padded.shape[0], 1, 1, padded.shape[-1], dtype=torch.bool)
    for port in mask_inputs(program, call):
        seen = seen & (given[port.node] == roles.visible[port.name]).reshape(padded.shape[0], 1, 1, -1)
    if not (padded == (whole & seen)).all():
        raise InputError(
            f"the mask of attention at {call.where} does not hide, for all queries alike, the keys that input "
            f"{', '.join(roles.visible)} marks; Sharp knows masks of padding [batch, keys], and makes others from sizes"
        )
