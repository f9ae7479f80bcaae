"""Models that attend within their inputs only (`--cache none`): each says its inputs, its output and how to compute it.

Attention is a callable that the caller passes in, as in `sharp.exporter.checkpoints.decoder`.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.graph.head_parts import Part, whole
from sharp.models.attention import AttentionFunction, EagerAttention
from sharp.models.config import SharpConfig
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.max_retrieval import MaxRetrieval
from sharp.models.number_sequence import SharpForNumbers
from sharp.plugins.manifest import ModelKind, Port, PositionScheme

ANY_NUMBER_OF_ITEMS = 2**31 - 1  # the set model has no limit of its own; the op counts keys in int32


class UncachedModel(nn.Module):
    """A model seen through its inputs and its one output; `config` says its attention.

    The batch is the first dimension of every input, and "length" or "items" the one that attention runs over.
    """

    kind: ModelKind
    config: SharpConfig
    positions: PositionScheme  # see `Decoder`
    inputs: tuple[Port, ...]
    output: Port

    @property
    def queries(self) -> int | str:
        """The queries of every layer, by number or by the name of the dimension."""
        return next((size for size in self.output.shape[1:-1]), 1)

    @abstractmethod
    def compute(self, attention: AttentionFunction, *inputs: Tensor) -> Tensor:
        """The output for `inputs`, with `attention` in every layer."""

    @abstractmethod
    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """The output by the source's own code; None where it lacks this norm."""

    @abstractmethod
    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Inputs of a size, to trace the model and to compare it."""

    def attention_mask(self, *_inputs: Tensor) -> Tensor | None:
        """The input that is 1 at what counts and 0 at padding, [batch, length]; None where there is no padding."""
        return None

    def layer_parts(self, _layer: int) -> tuple[Part, ...]:
        """What the attention nodes of a layer compute."""
        return whole(self.config)

    def stack(self, rows: list[Tensor]) -> Tensor:
        """[layers, batch, q_heads, queries, ...] of what layers have for their queries [batch, q_heads, queries, ...].

        Layers of fewer queries than `queries` have zeros behind them.
        """
        return torch.stack(rows)

    def eager(self, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output in PyTorch, and the attention weights of every layer [batch, q_heads, queries, keys]."""
        attention = EagerAttention(self.config, record=True, attention_mask=self.attention_mask(*inputs))
        computed = self.compute(attention, *inputs)
        own = self.own_output(*inputs)
        return computed if own is None else own, attention.weights


class UncachedDecoder(UncachedModel):
    """A decoder over whole sequences; what follows a token never changes its logits, so padding behind it is free."""

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
        """See `UncachedModel`."""
        (input_ids,) = inputs
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self.decoder.logits(self.decoder.hidden_states(input_ids, positions, attention))

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """See `UncachedModel`."""
        return self.decoder.own_logits(*inputs)

    def layer_parts(self, layer: int) -> tuple[Part, ...]:
        """See `UncachedModel`."""
        return self.decoder.layer_parts(layer)

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """See `UncachedModel`."""
        return (torch.randint(self.config.vocab_size, (batch, length), generator=generator),)


class UncachedEncoder(UncachedModel):
    """A `SharpForMaskedLM`."""

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
        """See `UncachedModel`."""
        logits: Tensor = self.model(*inputs, attention=attention)
        return logits

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """See `UncachedModel`."""
        logits: Tensor = self.model(*inputs)
        return logits

    def attention_mask(self, *inputs: Tensor) -> Tensor | None:
        """See `UncachedModel`."""
        return inputs[1]

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """See `UncachedModel`; the first sequence has no padding, the others any amount."""
        input_ids = torch.randint(self.config.vocab_size, (batch, length), generator=generator)
        tokens = torch.randint(1, length + 1, (batch, 1), generator=generator)
        tokens[0] = length
        return input_ids, (torch.arange(length) < tokens).long()


class UncachedSet(UncachedModel):
    """A `MaxRetrieval`: one query over a set, one head."""

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
        """See `UncachedModel`."""
        dtype = self.model.q_proj.weight.dtype  # half, where it is exported so; inputs stay float32
        logits: Tensor = self.model(*(one.to(dtype) for one in inputs), attention=attention)
        return logits

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """See `UncachedModel`."""
        logits: Tensor = self.model(*inputs)
        return logits

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """See `UncachedModel`."""
        classes = self.config.vocab_size
        kind = torch.randint(classes, (batch, length), generator=generator)
        priority = torch.rand(batch, length, 1, generator=generator)
        items = torch.cat([priority, nn.functional.one_hot(kind, classes).float()], dim=-1)
        return items, torch.rand(batch, 1, generator=generator)


class UncachedNumbers(UncachedModel):
    """A `SharpForNumbers`: a decoder that reads numbers."""

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
        """See `UncachedModel`."""
        dtype = next(self.model.decoder.embedding.parameters()).dtype  # half, where it is exported so
        predictions: Tensor = self.model(*(one.to(dtype) for one in inputs), attention=attention)
        return predictions

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """See `UncachedModel`."""
        predictions: Tensor = self.model(*inputs)
        return predictions

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """See `UncachedModel`."""
        return (torch.randn(batch, length, generator=generator),)
