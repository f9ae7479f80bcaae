"""`Outputs`: the output tensors of KServe's protocol, from the engine's events."""

from dataclasses import dataclass

from sharp.serving.api.events import Delta, FinishReason
from sharp.serving.frontends.kserve.tensors import (
    CUMULATIVE_LOGPROB,
    FINISH_REASON,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    TEXT_OUTPUT,
)


@dataclass
class Outputs:
    """Counts of one request: log probability since its start, tokens since the last response."""

    prompt_tokens: int
    logprob: float = 0.0
    new_tokens: int = 0

    def add(self, delta: Delta) -> None:
        """Add new tokens."""
        self.new_tokens += len(delta.token_ids)
        self.logprob += sum(entry.logprob for entry in delta.logprobs or ())

    def tensors(self, requested: frozenset[str], text: str, reason: FinishReason | None) -> dict[str, str | float]:
        """The requested tensors of a response with this text."""
        values: dict[str, str | float] = {
            TEXT_OUTPUT: text,
            FINISH_REASON: str(reason),  # "None" while there is none, as Triton's vLLM backend writes it
            CUMULATIVE_LOGPROB: self.logprob,
            NUM_INPUT_TOKENS: self.prompt_tokens,
            NUM_OUTPUT_TOKENS: self.new_tokens,
        }
        self.new_tokens = 0
        return {name: value for name, value in values.items() if name in requested}
