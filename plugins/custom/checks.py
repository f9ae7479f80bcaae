"""The checks of a user's normalizer for `sharp check-normalizer`, each a function."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper
from torch import Tensor

from sharp.plugins.op import custom_normalizer as normalizer
from sharp.plugins.op.custom_body import write_weights
from sharp.plugins.op.custom_normalizer import CustomNormalizer
from sharp.plugins.op.node_list import NodeList

TOLERANCE = 2e-5  # for a weight in float32
HUGE = (1e4, 1e30)
BLOCK_SIZES = (1, 7, 16)
OPSET = 23
NO_FORM = "it has no streamed form: its weights need the row"


@dataclass(frozen=True)
class Rows:
    """Logits float64 [heads, queries, keys], and which keys are visible, bool of the same shape."""

    logits: Tensor
    visible: Tensor


@dataclass(frozen=True)
class Check:
    """The result of one check; `problem` is empty if the check passed, and `note` is then a remark or empty."""

    name: str
    problem: str
    note: str = ""


class CheckFailed(Exception):  # noqa: N818 - never leaves this module
    """An error that a check raises to fail. Its text is a sentence that describes the problem to the user."""


def run_checks(custom: CustomNormalizer) -> Iterator[Check]:
    """Run all checks and yield each result as soon as it is known.

    The normalizer is made known in this process (`custom_normalizer.add`) and stays known. A failed check, or an
    exception of the user's code, becomes the `problem` of a result.
    """
    normalizer.add(custom)
    for name, check in CHECKS.items():
        try:
            note = check(custom) or ""
        except CheckFailed as failed:
            yield Check(name, str(failed))
        except Exception as error:  # raised by the user's code, or by ONNX Runtime about the user's body
            reason = (str(error).strip().splitlines() or ["without a message"])[0]
            yield Check(name, f"it fails: {type(error).__name__}: {reason[:200]}")
        else:
            yield Check(name, "", note)


def _rows(keys: int = 50) -> Rows:
    """Return random logits of 3 heads, 8 queries and `keys` keys, with a random mask.

    Every query sees the first key, except the last query, which sees no key, and the second last, which sees the second
    half of the keys.
    """
    random = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(3, 8, keys, generator=random, dtype=torch.float64)
    visible = torch.rand(3, 8, keys, generator=random) < 0.7
    visible[..., 0] = True
    visible[:, -2] = torch.arange(keys) >= keys // 2
    visible[:, -1] = False
    return Rows(logits, visible)


def _huge_rows() -> list[Rows]:
    """Return rows of huge logits: of both signs, all equal, and one far above the others."""
    found = []
    for size in HUGE:
        rows = _rows()
        logits = torch.sign(rows.logits) * size
        logits[:, 1], logits[:, 2] = size, -size
        logits[:, 3] = 0
        logits[:, 3, 0] = size
        found.append(Rows(logits, rows.visible))
    return found


def _exact(custom: CustomNormalizer, rows: Rows, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the normalizer's weights of `rows` in `dtype`, shaped as the logits; 0 where a key is not visible.

    Raises:
        CheckFailed: the weights have another shape or another dtype than the logits.
    """
    logits = rows.logits.to(dtype).masked_fill(~rows.visible, 0.0)
    found = custom.weights(logits, rows.visible)
    if found.shape != logits.shape:
        raise CheckFailed(f"weights of logits {list(logits.shape)} have the shape {list(found.shape)}")
    if found.dtype != dtype:
        raise CheckFailed(f"weights of logits in {dtype} are {found.dtype}; let no constant change the type")
    return found.masked_fill(~rows.visible, 0.0)


def _compare(found: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Check that no element of `found` differs by more than `tolerance` times max(1, the largest expected value).

    Raises:
        CheckFailed: a value differs, is NaN or infinite; the message begins with `what`.
    """
    if not found.isfinite().all():
        raise CheckFailed(f"{what} has NaN or infinite weights")
    difference = float((found.double() - expected).abs().max())
    if not difference <= tolerance * max(1.0, float(expected.abs().max())):
        raise CheckFailed(f"{what} differs by {difference:.1e}")


def _weights(custom: CustomNormalizer) -> str:
    """Check weights: equal in float32 and float64, >= 0, and 0 for visible keys only if `sparse` is set.

    Return the range of the rows' sums as a remark.

    Raises:
        CheckFailed: a condition does not hold.
    """
    exact = _exact(custom, _rows())
    _compare(_exact(custom, _rows(), torch.float32), exact, "float32, from float64,")
    if exact.min() < 0:
        raise CheckFailed(f"a weight is {float(exact.min()):.3g}; negative ones have no entropy, which servers report")
    if not custom.sparse and (exact == 0).logical_and(_rows().visible).any():
        raise CheckFailed("a visible key has the weight 0; say sparse=True, so that `support` counts the others")
    sums = exact[:, :-1].sum(-1)
    return f"rows add up to {float(sums.min()):.4g} to {float(sums.max()):.4g}"


def _mask(custom: CustomNormalizer) -> None:
    """Check that a row with hidden keys has the weights of the row without these keys, else raise CheckFailed."""
    rows = _rows()
    exact = _exact(custom, rows)
    for head in range(rows.logits.shape[0]):
        for query in range(rows.logits.shape[1] - 1):
            seen = rows.visible[head, query]
            alone = rows.logits[head, query, seen][None, None]
            expected = _exact(custom, Rows(alone, torch.ones_like(alone, dtype=torch.bool)))[0, 0]
            _compare(exact[head, query, seen], expected, "a row with hidden keys, from the row without them,", 1e-9)


def _order(custom: CustomNormalizer) -> None:
    """Check that permuted keys have the permuted weights, else raise CheckFailed."""
    rows = _rows()
    order = torch.randperm(rows.logits.shape[-1], generator=torch.Generator().manual_seed(1))
    turned = _exact(custom, Rows(rows.logits[..., order], rows.visible[..., order]))
    _compare(turned, _exact(custom, rows)[..., order], "the same keys in another order", 1e-9)


def _huge(custom: CustomNormalizer) -> None:
    """Check that huge logits in float32 have the finite weights of float64, else raise CheckFailed."""
    for rows, size in zip(_huge_rows(), HUGE, strict=True):
        _compare(_exact(custom, rows, torch.float32), _exact(custom, rows), f"logits of {size:g} in float32")


def _gradients(custom: CustomNormalizer) -> None:
    """Check gradients: finite for huge logits and rows without a visible key, and equal to finite differences.

    Raises:
        CheckFailed: a gradient is NaN or infinite.
        RuntimeError: `torch.autograd.gradcheck` found a difference.
    """
    rows = _rows(keys=12)

    def visible_weights(logits: Tensor) -> Tensor:
        """Return the weights as a function of the visible logits only."""
        return custom.weights(logits.masked_fill(~rows.visible, 0.0), rows.visible).masked_fill(~rows.visible, 0.0)

    for case in (rows, *_huge_rows()):
        logits = case.logits.float().requires_grad_()
        shown = custom.weights(logits.masked_fill(~case.visible, 0.0), case.visible).masked_fill(~case.visible, 0.0)
        (shown * torch.linspace(0, 1, shown.shape[-1])).sum().backward()
        if logits.grad is None or not logits.grad.isfinite().all():
            raise CheckFailed("they are NaN or infinite for huge logits or rows without a visible key")
    torch.autograd.gradcheck(visible_weights, (rows.logits.clone().requires_grad_(),))


def _reference_attention(
    custom: CustomNormalizer, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, block_size: int
) -> Tensor:
    """Compute attention [heads, queries, value_dim] as a kernel does, `block_size` keys at a time.

    A query that sees no key has the output 0. A normalizer without a streamed form needs memory for all logits.

    Args:
        custom: the user's normalizer.
        query: [heads, queries, head_dim], already multiplied by the scale.
        keys: [heads, keys, head_dim].
        values: [heads, keys, value_dim].
        visible: bool [heads, queries, keys].
        block_size: the number of keys in a block.
    """
    if custom.streamed is None:
        logits = (query @ keys.mT).masked_fill(~visible, 0.0)
        return custom.weights(logits, visible).masked_fill(~visible, 0.0) @ values
    streamed = custom.streamed
    state = tuple(query.new_full((*query.shape[:2], 1), number) for number in streamed.start)
    output = query.new_zeros(*query.shape[:2], values.shape[2])
    for first in range(0, keys.shape[1], block_size):
        block = slice(first, first + block_size)
        seen = visible[:, :, block]
        logits = (query @ keys[:, block].mT).masked_fill(~seen, 0.0)
        state, weights, factor = streamed.step(state, logits, seen)
        output = output * factor + weights.masked_fill(~seen, 0.0) @ values[:, block]
    any_key = visible.any(-1, keepdim=True)
    return torch.where(any_key, output * streamed.end(state), 0.0)


def _streamed(custom: CustomNormalizer) -> str:
    """Check that attention computed in blocks of keys equals that over whole rows, else raise CheckFailed.

    Return a remark if the normalizer has no streamed form, else "".
    """
    random = torch.Generator().manual_seed(2)
    for rows in (_rows(), *_huge_rows()):
        keys = rows.logits.shape[-1]
        values = torch.randn(3, keys, 4, generator=random, dtype=torch.float64)
        expected = _exact(custom, rows) @ values
        # With the identity as keys, a query is its own row of logits, so any logits can be tested.
        identity = torch.eye(keys, dtype=torch.float64).expand(3, keys, keys)
        for size in BLOCK_SIZES:
            found = _reference_attention(custom, rows.logits, identity, values, rows.visible, size)
            _compare(found, expected, f"the output in blocks of {size} keys, from whole rows,", 1e-9)
    return "" if custom.streamed is not None else NO_FORM


def _body(custom: CustomNormalizer) -> None:
    """Check that the ONNX body in ONNX Runtime has the weights of the PyTorch function, else raise CheckFailed."""
    nodes = NodeList()
    weights = write_weights(nodes, custom.name, "logits", "visible")
    nodes.op("Where", "visible", weights, nodes.constant(0.0), name="weights")
    tensor = helper.make_tensor_value_info
    shape = ["heads", "queries", "keys"]
    graph = helper.make_graph(
        nodes.leading_to(["weights"]),
        "body",
        [tensor("logits", onnx.TensorProto.FLOAT, shape), tensor("visible", onnx.TensorProto.BOOL, shape)],
        [tensor("weights", onnx.TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for rows in (_rows(), *_huge_rows()):
        inputs = {"logits": rows.logits.numpy().astype(np.float32), "visible": rows.visible.numpy()}
        found = torch.from_numpy(session.run(None, inputs)[0])
        _compare(found, _exact(custom, rows), "the body in ONNX Runtime, from the function,")


CHECKS: dict[str, Callable[[CustomNormalizer], str | None]] = {
    "weights": _weights,
    "mask": _mask,
    "order of keys": _order,
    "huge logits": _huge,
    "gradients": _gradients,
    "reference kernel, streamed": _streamed,
    "body of standard ops": _body,
}
