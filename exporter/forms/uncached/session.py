"""The session that runs a folder exported with `--cache none` in ONNX Runtime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sharp.exporter.forms.session import open_session
from sharp.exporter.forms.uncached.model import COLLECT_STATS, STATS
from sharp.exporter.verification.comparison import Floats


class UncachedSession:
    """A session that computes whole batches.

    With `kernels` the attention runs in Sharp's library; without, ONNX Runtime inlines the function body. `threads` is
    the number of CPU threads (0: all).
    """

    def __init__(self, folder: Path, *, kernels: bool, threads: int = 0) -> None:
        self.session = open_session(folder, kernels=kernels, threads=threads)
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.output = next(value.name for value in self.session.get_outputs() if value.name != STATS)

    def run(self, inputs: Sequence[NDArray[np.generic]]) -> Floats:
        """Return the model's output for its inputs, which are in the order of the graph, without `collect_stats`."""
        output: Floats
        (output,) = self.session.run([self.output], dict(zip(self.inputs, inputs, strict=True)))
        return output

    def run_with_stats(self, inputs: Sequence[NDArray[np.generic]]) -> tuple[Floats, Floats]:
        """Return the model's output and the statistics [layers, batch, q_heads, queries, columns].

        `inputs` are in the order of the graph, without `collect_stats`.
        """
        feeds = {**dict(zip(self.inputs, inputs, strict=True)), COLLECT_STATS: np.array(True)}
        output, stats = self.session.run([self.output, STATS], feeds)
        return output, stats
