"""`TensorRequest`: a request with a model's own tensors, from the frontend that reads it to the engine that runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TensorRequest:
    """A request for what a model makes of its inputs. `TensorFolder.prepare_tensors` checks it.

    Attributes:
        request_id: unique among running requests.
        inputs: by name; the first dimension of each is the batch, whose rows are computed independently.
        tokens: the length of a row, in items or numbers.
    """

    request_id: str
    inputs: Mapping[str, NDArray[np.float32]]
    tokens: int = 0

    @property
    def rows(self) -> int:
        """The size of the batch."""
        return len(next(iter(self.inputs.values())))

    @property
    def row_tokens(self) -> Sequence[int]:
        """How many items or numbers each row has."""
        return (self.tokens,) * self.rows

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """It reads no token ids."""
        return ()

    @property
    def prompt_tokens(self) -> int:
        """How many items or numbers it reads."""
        return self.tokens * self.rows

    @property
    def completions(self) -> int:
        """How often the engine says that something of it is finished."""
        return 1
