"""`TokenAttention`: the weights of a head on single tokens, for who looks at a request."""

from pathlib import Path

from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import InputError
from sharp.serving.engine.attention_process import AttentionProcess, TokenWeights, most_tokens, why_not
from sharp.serving.frontends.admission import Pool

MOST_WAITING = 4


class TokenAttention:
    """Rows of a served model, computed one at a time beside the engine; lives in one event loop."""

    def __init__(self, folder: Path, manifest: Manifest, device: str, threads: int, *, kernels: bool) -> None:
        """`folder` is the model's, which runs on a device with `threads`, with Sharp's kernels or without."""
        self.refusal = why_not(manifest, device, kernels=kernels)
        self.most_tokens = 0 if self.refusal else most_tokens(manifest)
        self._process = AttentionProcess(folder, max(1, threads // 2))
        self._pool = Pool("computed", 1, MOST_WAITING)

    async def row(self, tokens: list[int], layer: int, head: int, position: int) -> TokenWeights:
        """The weights that a head gives as the token at `position` is read; the numbers are in range.

        Raises:
            InputError: the model is not one whose rows can be computed.
            QueueFullError: `MOST_WAITING` wait already.
            EngineError, TimeLimitError, UnavailableError: see `AttentionProcess.row`.
        """
        self.check()
        return await self._pool.run(lambda: self._process.row(tokens, layer, head, position))

    def check(self) -> None:
        """Raise InputError if the model is not one whose rows can be computed."""
        if self.refusal is not None:
            raise InputError(self.refusal)

    def close(self) -> None:
        """End the process and the thread."""
        self._pool.close()
        self._process.close()
