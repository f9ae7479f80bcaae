"""A trial of a model at its start: the first token or row, computed before any request is served."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.plugins.cpu import sampling
from sharp.serving.api.errors import DeviceLostError, InputError
from sharp.serving.backends import DecoderBackend, StepInputs
from sharp.serving.backends.rows import RowBackend

TOKENS = 4
NOT_FINITE = (
    "{name} gives {what} that are not finite for its first {place}, so its weights are damaged or overflow; copy or "
    "export the model again, with --dtype float32 if it was float16"
)


def check_first_token(backend: DecoderBackend, manifest: Manifest) -> None:
    """Compute a token after a short prompt in block 0, which no sequence uses yet.

    Raises:
        InputError: the step fails, or its logits are not finite.
        DeviceLostError: the GPU is lost, which is not the model's fault.
        SharpError: the library that samples tokens cannot be used.
    """
    most = TOKENS if backend.limits is None else min(TOKENS, backend.limits.tokens)
    count = min(most, manifest.cache.block_size, manifest.max_context)
    positions = np.arange(count)
    tokens = positions % manifest.vocab_size
    tokens[0] = manifest.vocab_size - 1  # the last token of the vocabulary must have an embedding, too
    batch = StepInputs(
        input_ids=tokens,
        positions=positions,
        slot_mapping=positions.astype(np.int32),
        block_table=np.zeros((1, 1), np.int32),
        query_start=np.array([0, count], np.int32),
        context_lens=np.zeros(1, np.int32),
        logits_indices=np.array([count - 1], np.int64),
        collect_stats=False,
    )
    logits = _computed(lambda: backend.step(batch).logits, manifest)
    greedy = np.array([[0, 0, 1, 0, 0]], np.float64)
    # Some models give -infinity to tokens that they hide, so -infinity is accepted.
    if np.isnan(logits).any() or (sampling.sample(logits, greedy) == sampling.NO_TOKEN).any():
        raise InputError(NOT_FINITE.format(name=manifest.name, what="logits", place="token"))


def check_first_row(
    backend: RowBackend, manifest: Manifest, inputs: Mapping[str, NDArray[Any]], expected: tuple[int, ...], size: str
) -> None:
    """Compute `inputs`, a batch of one short row, before any request, and check the result.

    The result must be finite float32 of the shape `expected`. `size` says in words what the row is, for the message.

    Raises:
        InputError: the computation fails, or its result is not finite or has another shape or type.
        DeviceLostError: the GPU is lost, which is not the model's fault.
    """
    values = _computed(lambda: backend.run(inputs, collect_stats=True).values, manifest)
    if values.shape != expected or values.dtype != np.float32:
        raise InputError(
            f"{manifest.name} gives {list(values.shape)} numbers for {size}, and sharp.json "
            f"describes {list(expected)}; export the model again"
        )
    if not np.isfinite(values).all():
        raise InputError(NOT_FINITE.format(name=manifest.name, what="numbers", place="row"))


def _computed(compute: Callable[[], NDArray[np.float32]], manifest: Manifest) -> NDArray[np.float32]:
    """Call `compute` and return its logits. InputError for any error of the runtime except a lost device."""
    try:
        return compute()
    except DeviceLostError:
        raise
    except Exception as error:  # runtimes have no common exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{manifest.name} does not run: {reason}; export the model again") from error
