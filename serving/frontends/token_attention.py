"""`TokenAttention`: the attention weights of one head on single tokens, for someone who examines a request."""

from pathlib import Path

from sharp.core.manifest import Manifest
from sharp.serving.api.errors import InputError
from sharp.serving.config import BackendConfig
from sharp.serving.engine.attention_process import AttentionProcess, TokenWeights, most_tokens, why_not
from sharp.serving.frontends.admission import Pool

MOST_WAITING = 4


class TokenAttention:
    """Rows of attention weights of a served model, computed one at a time beside the engine, in one event loop."""

    def __init__(
        self, folder: Path, manifest: Manifest, device: str, settings: BackendConfig, *, kernels: bool
    ) -> None:
        """Take the model in `folder`, which runs on `device`, with Sharp's kernels or without.

        The setting `weights` of `settings` says what the server does, "copy" or "map".
        """
        self.refusal = why_not(manifest, device, kernels=kernels)
        self.most_tokens = 0 if self.refusal else most_tokens(manifest)
        threads = max(1, settings.threads // 2)
        copy = settings.weights != "map"
        self._process = AttentionProcess(folder, threads, copy=copy, verify=settings.verify_files)
        self._pool = Pool("computed", 1, MOST_WAITING)

    async def row(self, tokens: list[int], layer: int, head: int, position: int) -> TokenWeights:
        """Return the weights that a head gives as the token at `position` is read; the numbers are in range.

        Raises:
            InputError: rows of this model cannot be computed.
            QueueFullError: `MOST_WAITING` rows wait already.
            EngineError, TimeLimitError, UnavailableError: raised by `AttentionProcess.row`.
        """
        self.check()
        return await self._pool.run(lambda: self._process.row(tokens, layer, head, position))

    def check(self) -> None:
        """Raise InputError if rows of this model cannot be computed."""
        if self.refusal is not None:
            raise InputError(self.refusal)

    def close(self) -> None:
        """End the process and the thread that compute rows."""
        self._pool.close()
        self._process.close()
