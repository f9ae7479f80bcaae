"""The first token of a model, computed before anybody is served."""

import numpy as np

from sharp.plugins import sampling
from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import DeviceLostError, InputError
from sharp.serving.backends import Backend, Batch

TOKENS = 4


def check_first_token(backend: Backend, manifest: Manifest) -> None:
    """Compute a token after a short prompt in block 0, which no sequence has yet.

    Raises:
        InputError: the step fails, or its logits are not finite.
        DeviceLostError: the GPU is lost, which says nothing of the model.
        SharpError: the library that samples tokens cannot be used.
    """
    most = TOKENS if backend.limits is None else min(TOKENS, backend.limits.tokens)
    count = min(most, manifest.cache.block_size, manifest.max_context)
    positions = np.arange(count)
    batch = Batch(
        input_ids=positions % manifest.vocab_size,
        positions=positions,
        slot_mapping=positions.astype(np.int32),
        block_table=np.zeros((1, 1), np.int32),
        query_start=np.array([0, count], np.int32),
        context_lens=np.zeros(1, np.int32),
        logits_indices=np.array([count - 1], np.int64),
        collect_stats=False,
    )
    try:
        logits = backend.step(batch).logits
    except DeviceLostError:
        raise
    except Exception as error:  # runtimes have no common exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{manifest.name} does not run: {reason}; export the model again") from error
    greedy = np.array([[0, 0, 1, 0, 0]], np.float64)
    # -infinity is what some models give tokens that they hide.
    if np.isnan(logits).any() or (sampling.sample(logits, greedy) == sampling.NO_TOKEN).any():
        raise InputError(
            f"{manifest.name} gives logits that are not finite for its first token, so its weights are damaged or "
            "overflow; copy or export the model again, with --dtype float32 if it was float16"
        )
