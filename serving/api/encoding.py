"""`EncodeRequest`: texts to encode, as frontends create the request and the engine runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Text = str | tuple[str, str]  # a text, or a pair of texts that the model reads as one input


class TextTokens(NamedTuple):
    """The tokens of an input, and the number, 0 or 1, of each token's text in a pair; empty if all are 0."""

    token_ids: Sequence[int]
    token_types: Sequence[int] = ()


@dataclass(frozen=True)
class EncodeRequest:
    """A request for the encodings of some inputs, which are `texts` or `token_ids`.

    Frontends create it. `EncoderFolder.prepare_encoding` checks it and fills in `tokens`, which the engine reads.

    Attributes:
        request_id: unique among running requests.
        texts: texts, or pairs of texts.
        token_ids: inputs given as token ids.
        field: the name of the inputs in the client's request, for messages.
        special_tokens: add the tokenizer's special tokens to texts.
        truncate: cut a longer input to this many tokens; -1 means to the model's limit, None means to refuse it.
        truncate_left: cut off the first tokens instead of the last.
        client: the name of the client, whose share of the server the request uses; frontends set it.
        tokens: the tokens of each input.
    """

    request_id: str
    texts: Sequence[Text] = ()
    token_ids: Sequence[Sequence[int]] = ()
    field: str = "input"
    special_tokens: bool = True
    truncate: int | None = None
    truncate_left: bool = False
    client: str = ""
    tokens: tuple[TextTokens, ...] = ()

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The token ids of each input."""
        return [text.token_ids for text in self.tokens]

    @property
    def row_tokens(self) -> Sequence[int]:
        """The number of tokens of each input."""
        return [len(text.token_ids) for text in self.tokens]

    @property
    def prompt_tokens(self) -> int:
        """The total number of tokens of all inputs."""
        return sum(self.row_tokens)

    @property
    def completions(self) -> int:
        """The number of Finished events that the engine sends for the request."""
        return 1
