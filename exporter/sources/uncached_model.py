"""Models without a cache (`--cache none`), which attend within their inputs only.

Attention is a callable that the caller passes in, as in `sharp.exporter.sources.decoder`.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from sharp.core.manifest import ModelKind, Port, PositionScheme
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.head_parts import HeadPart, whole
from sharp.models.attention import AttentionFunction, EagerAttention
from sharp.models.config import SharpConfig
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.max_retrieval import MaxRetrieval
from sharp.models.number_sequence import SharpForNumbers

ANY_NUMBER_OF_ITEMS = 2**31 - 1  # the set model has no limit of its own; the op counts keys in int32


class UncachedModel(nn.Module):
    """A model with declared inputs and one output; `config` describes its attention.

    The first dimension of every input is the batch. Attention runs over the dimension named "length" or "items".
    Methods take and return input tensors in the order of `inputs`.
    """

    kind: ModelKind
    config: SharpConfig
    positions: PositionScheme  # `config.positions`, or "learned", which `config` cannot say
    inputs: tuple[Port, ...]
    output: Port

    @property
    def queries(self) -> int | str:
        """The number of queries of every layer, or the name of the dimension that has them."""
        return next((size for size in self.output.shape[1:-1]), 1)

    @abstractmethod
    def compute(self, attention: AttentionFunction, *inputs: Tensor) -> Tensor:
        """Compute the output for `inputs`, with `attention` in every layer."""

    @abstractmethod
    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """Compute the output with the source's own code; None if that code lacks this norm."""

    @abstractmethod
    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return random inputs of `batch` sequences or sets of `length` members, for tracing and for comparisons.

        Masks mark padding in some sequences, but not in the first.
        """

    def attention_mask(self, *_inputs: Tensor) -> Tensor | None:
        """Return the mask [batch, length] among the inputs, 1 at tokens and 0 at padding.

        None if no input is a padding mask for `EagerAttention`, as for all models that do not override this method.
        """
        return None

    def layer_parts(self, _layer: int) -> tuple[HeadPart, ...]:
        """Return one part for each attention node of a layer: its heads and its norm."""
        return whole(self.config)

    def stack(self, rows: list[Tensor]) -> Tensor:
        """Stack tensors of the layers, each [batch, q_heads, queries, ...], to [layers, batch, q_heads, queries, ...].

        All tensors must have one shape, unless a subclass pads them with zeros.
        """
        return torch.stack(rows)

    def eager(self, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute the output in PyTorch, and the attention weights of every layer [batch, q_heads, queries, keys].

        The output is that of the source's own code if that code has this norm (`own_output`).
        """
        attention = EagerAttention(self.config, record=True, attention_mask=self.attention_mask(*inputs))
        computed = self.compute(attention, *inputs)
        own = self.own_output(*inputs)
        return computed if own is None else own, attention.weights


class UncachedDecoder(UncachedModel):
    """A decoder over whole sequences. Later tokens never change the logits of a token, so it needs no padding mask."""

    kind: ModelKind = "decoder"

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.config = decoder.config
        self.positions = decoder.positions
        self.inputs = (Port(name="input_ids", dtype="int64", shape=("batch", "length"), doc="token ids"),)
        self.output = Port(
            name="logits", dtype="float32", shape=("batch", "length", self.config.vocab_size), doc="of the next token"
        )

    def compute(self, attention: AttentionFunction, *inputs: Tensor) -> Tensor:
        """Compute logits [batch, length, vocab] of token ids int64 [batch, length]."""
        (input_ids,) = inputs
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self.decoder.logits(self.decoder.hidden_states(input_ids, positions, attention))

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """Compute logits with the source's own code; None if that code lacks this norm."""
        return self.decoder.own_logits(*inputs)

    def layer_parts(self, layer: int) -> tuple[HeadPart, ...]:
        """Return the parts into which the decoder splits a layer's heads, one per norm."""
        return self.decoder.layer_parts(layer)

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return random token ids, int64 [batch, length]."""
        return (torch.randint(self.config.vocab_size, (batch, length), generator=generator),)


class UncachedEncoder(UncachedModel):
    """An encoder, `SharpForMaskedLM`, over token ids and a mask of padding."""

    kind: ModelKind = "encoder"

    def __init__(self, model: SharpForMaskedLM) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.positions = self.config.positions
        self.inputs = (
            Port(name="input_ids", dtype="int64", shape=("batch", "length"), doc="token ids"),
            Port(
                name="attention_mask",
                dtype="int64",
                shape=("batch", "length"),
                doc="1 at tokens, then 0 at the padding behind them",
            ),
        )
        self.output = Port(
            name="logits",
            dtype="float32",
            shape=("batch", "length", self.config.vocab_size),
            doc="of the token at each position",
        )

    def compute(self, attention: AttentionFunction, *inputs: Tensor) -> Tensor:
        """Return logits [batch, length, vocab] of the encoder, with `attention` in every layer."""
        logits: Tensor = self.model(*inputs, attention=attention)
        return logits

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """Compute logits with the model's own eager attention; never None."""
        logits: Tensor = self.model(*inputs)
        return logits

    def attention_mask(self, *inputs: Tensor) -> Tensor | None:
        """Return the second input, the mask int64 [batch, length] with 1 at tokens and 0 at padding; never None.

        Both inputs must be given; otherwise IndexError is raised.
        """
        return inputs[1]

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return random token ids and masks, int64 [batch, length]; the first sequence has no padding, others any."""
        input_ids = torch.randint(self.config.vocab_size, (batch, length), generator=generator)
        tokens = torch.randint(1, length + 1, (batch, 1), generator=generator)
        tokens[0] = length
        return input_ids, (torch.arange(length) < tokens).long()


class UncachedSet(UncachedModel):
    """A `MaxRetrieval` model: one query attends to a set of items with one head."""

    kind: ModelKind = "set"

    def __init__(self, model: MaxRetrieval) -> None:
        super().__init__()
        self.model = model
        own = model.config
        self.config = SharpConfig(
            vocab_size=own.classes,
            hidden_size=own.hidden_size,
            intermediate_size=own.hidden_size,
            layers=1,
            q_heads=1,
            kv_heads=1,
            head_dim=own.hidden_size,
            norm=own.norm,
            positions="none",
            trained_context=own.trained_items,
            max_context=ANY_NUMBER_OF_ITEMS,
            alpha=own.alpha,
            temperature=own.temperature,
            temperature_coefficients=own.temperature_coefficients,
            entropy_threshold=own.entropy_threshold,
            causal=False,
        )
        self.positions = self.config.positions
        features = 1 + own.classes
        self.inputs = (
            Port(
                name="items",
                dtype="float32",
                shape=("batch", "items", features),
                doc="priority, then the class as a one-hot vector",
            ),
            Port(name="query", dtype="float32", shape=("batch", 1), doc="carries no information"),
        )
        self.output = Port(
            name="logits", dtype="float32", shape=("batch", own.classes), doc="of the class of the largest item"
        )

    def compute(self, attention: AttentionFunction, *inputs: Tensor) -> Tensor:
        """Compute logits [batch, classes] of the class of the largest item."""
        dtype = self.model.q_proj.weight.dtype  # float16 in an export with half precision; inputs stay float32
        logits: Tensor = self.model(*(tensor.to(dtype) for tensor in inputs), attention=attention)
        return logits

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """Compute logits with the model's own eager attention; never None."""
        logits: Tensor = self.model(*inputs)
        return logits

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return `length` random items, float32 [batch, length, 1 + classes], and a random query [batch, 1]."""
        classes = self.config.vocab_size
        kind = torch.randint(classes, (batch, length), generator=generator)
        priority = torch.rand(batch, length, 1, generator=generator)
        items = torch.cat([priority, nn.functional.one_hot(kind, classes).float()], dim=-1)
        return items, torch.rand(batch, 1, generator=generator)


class UncachedNumbers(UncachedModel):
    """A `SharpForNumbers` model: a decoder over numbers instead of tokens."""

    kind: ModelKind = "numbers"

    def __init__(self, model: SharpForNumbers) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.positions = self.config.positions
        self.inputs = (Port(name="numbers", dtype="float32", shape=("batch", "length"), doc="the sequence"),)
        shape = ("batch", "length", self.config.vocab_size)
        self.output = Port(
            name="predictions", dtype="float32", shape=shape, doc="the next number, or logits of its class"
        )

    def compute(self, attention: AttentionFunction, *inputs: Tensor) -> Tensor:
        """Compute predictions of the next number, [batch, length, classes]."""
        dtype = next(self.model.decoder.embedding.parameters()).dtype  # float16 in an export with half precision
        predictions: Tensor = self.model(*(tensor.to(dtype) for tensor in inputs), attention=attention)
        return predictions

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """Compute predictions with the model's own eager attention; never None."""
        predictions: Tensor = self.model(*inputs)
        return predictions

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return random numbers, float32 [batch, length]."""
        return (torch.randn(batch, length, generator=generator),)
