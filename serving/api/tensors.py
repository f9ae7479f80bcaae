"""`TensorRequest`: a request with a model's own tensors, as frontends create it and the engine runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TensorRequest:
    """A request for a model's output for some input tensors. `TensorFolder.prepare_tensors` checks it.

    Attributes:
        request_id: unique among running requests.
        inputs: tensors by input name. The first dimension of each is the batch, whose rows are computed independently.
        tokens: the length of a row, in items or numbers.
        client: the name of the client, whose share of the server the request uses; frontends set it.
    """

    request_id: str
    inputs: Mapping[str, NDArray[np.float32]]
    tokens: int = 0
    client: str = ""

    @property
    def rows(self) -> int:
        """The size of the batch."""
        return len(next(iter(self.inputs.values())))

    @property
    def row_tokens(self) -> Sequence[int]:
        """The number of items or numbers in each row."""
        return (self.tokens,) * self.rows

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The token ids of the prompts: empty, because the model reads no token ids."""
        return ()

    @property
    def prompt_tokens(self) -> int:
        """The total number of items or numbers in the request."""
        return self.tokens * self.rows

    @property
    def completions(self) -> int:
        """The number of Finished events that the engine sends for the request."""
        return 1
