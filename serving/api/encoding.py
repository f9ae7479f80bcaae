"""`EncodeRequest`: texts to encode, from the frontend that reads them to the engine that runs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Text = str | tuple[str, str]  # a text, or a pair that the model reads as one


class TextTokens(NamedTuple):
    """The tokens of an input, and for each the text of a pair that it is from, 0 or 1; empty where all are 0."""

    token_ids: Sequence[int]
    token_types: Sequence[int] = ()


@dataclass(frozen=True)
class EncodeRequest:
    """A request for the encodings of some inputs, which are `texts` or `token_ids`.

    Frontends make it; `EncoderFolder.prepare_encoding` checks it and fills in `tokens`, which the engine reads.

    Attributes:
        request_id: unique among running requests.
        texts: texts, or pairs of them.
        token_ids: inputs of tokens.
        field: the name of the inputs in the client's request, for messages.
        special_tokens: add the tokenizer's special tokens to texts.
        truncate: keep so many tokens of an input that is longer; -1 is what the model takes, None refuses it.
        truncate_left: leave out its first tokens, not the last.
        tokens: those of each input.
    """

    request_id: str
    texts: Sequence[Text] = ()
    token_ids: Sequence[Sequence[int]] = ()
    field: str = "input"
    special_tokens: bool = True
    truncate: int | None = None
    truncate_left: bool = False
    tokens: tuple[TextTokens, ...] = ()

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The token ids of what it reads."""
        return [one.token_ids for one in self.tokens]

    @property
    def row_tokens(self) -> Sequence[int]:
        """How many tokens each of its inputs has."""
        return [len(one.token_ids) for one in self.tokens]

    @property
    def prompt_tokens(self) -> int:
        """How many tokens it reads."""
        return sum(self.row_tokens)

    @property
    def completions(self) -> int:
        """How often the engine says that something of it is finished."""
        return 1
