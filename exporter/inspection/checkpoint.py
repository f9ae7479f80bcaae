"""Records of a checkpoint, whose model runs in PyTorch with the op in plain torch as attention."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.checkpoints.trained_norm import recorded_norm
from sharp.exporter.inspection.one_sequence import attend_one_sequence
from sharp.exporter.inspection.prompt import read_tokenizer
from sharp.exporter.inspection.recording import (
    INVERSE_TEMPERATURE,
    Floats,
    Inputs,
    InspectedModel,
    LayerRecord,
    Projections,
)
from sharp.exporter.inspection.set_record import QUERY, set_record
from sharp.exporter.programs.reading import NO_PROGRAM_OPTIONS, ProgramOptions, read_program
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.op_attributes import op_attributes
from sharp.exporter.sources.source import Source
from sharp.exporter.sources.uncached_model import UncachedNumbers, UncachedSet
from sharp.models.attention import DEFAULT_OPTIONS, LayerOptions
from sharp.models.checkpoint_files import is_sharp_folder
from sharp.models.config import SharpConfig
from sharp.models.max_retrieval import MaxRetrieval
from sharp.plugins.op.normalizers import Normalizer
from sharp.plugins.op.torch_normalizers import joined_head_params


def open_checkpoint(
    path: Path, program: ProgramOptions = NO_PROGRAM_OPTIONS, ignore: Sequence[str] = ()
) -> InspectedModel:
    """Open a checkpoint, with the norm that it was trained with (softmax if it does not say).

    `program` are options for programs of torch.export (.pt2), and `ignore` names unknown keys of the checkpoint to
    accept.

    Raises:
        InputError, NotFoundError: the checkpoint cannot be read, or is no decoder and no model of numbers or sets.
    """
    if path.suffix == ".pt2" and path.exists():
        source = read_program(path, None, given=program)
    else:
        own = path.suffix in (".pt", ".safetensors") or is_sharp_folder(path)
        source = read_source(path, None if own else recorded_norm(path) or "softmax", ignore=ignore)
    if source.no_cache is not None:
        raise InputError(f"{path} is no decoder over tokens, which sharp inspect reads: {source.no_cache}")
    model = source.model
    width = None
    if isinstance(model, Decoder):
        record = partial(record_decoder, model)
    elif isinstance(model, UncachedNumbers):
        record, width = partial(record_numbers, model), 0
    elif isinstance(model, UncachedSet):
        record, width = partial(record_set, model.model), 1 + model.model.config.classes
    else:
        what = "decoders over tokens, models of numbers and of sets"
        raise InputError(f"{path} is a {source.architecture}; sharp inspect reads {what}")
    config = model.config
    return InspectedModel(
        name=source.name,
        norm=config.norm,
        layers=config.layers,
        q_heads=config.q_heads,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        trained_context=config.trained_context,
        tokenizer=_tokenizer(source),
        record=record,
        numbers_of_item=width,
    )


def _tokenizer(source: Source) -> Tokenizer | None:
    """Read the tokenizer file that an export of the source would contain; None if it would have none.

    Raises:
        InputError: the file is not a tokenizer.
    """
    if source.write_tokenizer is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source.save_tokenizer(Path(folder))
        return read_tokenizer(Path(folder) / "tokenizer.json")


def record_decoder(decoder: Decoder, token_ids: Inputs) -> tuple[LayerRecord, ...]:
    """Run `decoder` once over one sequence of ids int64 [tokens], and return a record per layer."""
    ids, positions = torch.from_numpy(token_ids)[None], torch.arange(len(token_ids))[None]
    return recorded(decoder, decoder.config, lambda attention: decoder.hidden_states(ids, positions, attention))


def record_numbers(model: UncachedNumbers, numbers: Inputs) -> tuple[LayerRecord, ...]:
    """Run `model` once over one sequence of numbers float32 [tokens], and return a record per layer."""
    given = torch.from_numpy(numbers)[None]
    return recorded(model, model.config, lambda attention: model.compute(attention, given))


@torch.no_grad()
def record_set(model: MaxRetrieval, items: Inputs) -> tuple[LayerRecord, ...]:
    """Return the head's record for the sets of the first n items, for every n; items are [items, 1 + classes]."""
    config, count = model.config, len(items)
    asked = model.embed_query(torch.full((1, 1), QUERY)).expand(1, count, -1)  # [1, items, hidden_size]
    query, factor = model.q_proj(asked), None
    if model.query_scale is not None:
        factor = model.query_scale(asked, torch.arange(count)[None])  # [1, items, 1 head]
        query = query * factor
    key = model.k_proj(model.embed_item(torch.from_numpy(items)))
    params = config.scheme.own_params(None if model.head_parameters is None else model.head_parameters(), 1)
    normalizer = Normalizer(
        config.scheme.normalizer, config.alpha, config.temperature_coefficients, config.entropy_threshold
    )
    return (
        set_record(
            query[0, :, None].numpy(),
            key[:, None].numpy(),
            None if params is None else params.numpy(),
            normalizer,
            config.scale,
            None if factor is None else factor[0].float().numpy(),
        ),
    )


@torch.no_grad()
def recorded(
    model: nn.Module, config: SharpConfig, run: Callable[["RecordingAttention"], object]
) -> tuple[LayerRecord, ...]:
    """Call `run` with an attention function that records its inputs, and return the records of all layers.

    `run` runs `model` once over one sequence with this attention. Gradients are off.
    """
    attention = RecordingAttention(config)
    hooks = [
        module.register_forward_hook(attention.see_projection)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("q_proj", "k_proj") and isinstance(module, nn.Linear)
    ]
    try:
        run(attention)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(attention.records)


class RecordingAttention:
    """An `AttentionFunction` over one sequence that keeps a record of every layer in `records`.

    An instance is for one run of a model, whose layers must call it in order. `see_projection` may be registered as the
    forward hook of the model's q_proj and k_proj, from which the records get the matrices of Q and K.
    """

    def __init__(self, config: SharpConfig) -> None:
        self.config = config
        self.records: list[LayerRecord] = []
        self._projected: list[tuple[Tensor, Tensor]] = []  # (input, matrix) of q_proj, k_proj since the last attention

    def see_projection(self, module: nn.Linear, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        """Keep input and matrix of q_proj or k_proj for the layer's record, as the forward hook of these modules."""
        self._projected.append((inputs[0], module.weight))

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
        /,
    ) -> Tensor:
        """Compute attention and record its inputs.

        Args:
            layer: the number of the layer.
            query: [1, tokens, q_heads, head_dim].
            key: [1, tokens, kv_heads, head_dim].
            value: as `key`.
            head_params: [q_heads, P] or None.
            alibi_slopes: [q_heads] or None.
            options: the options of the layer.

        Returns:
            The output, shaped as `query`.
        """
        assert layer == len(self.records)
        config = self.config
        head_params = joined_head_params(config.scheme.own_params(head_params, config.q_heads), options.sinks)
        output, stats = self._attend(query[0], key[0], value[0], head_params, alibi_slopes, options)
        factor = None if options.query_factor is None else options.query_factor[0].float()
        if factor is not None:
            stats[..., INVERSE_TEMPERATURE] *= factor  # statistics of an exported model include the length scale, too
        self.records.append(
            LayerRecord(
                query=query[0].numpy(),
                key=key[0].numpy(),
                head_params=None if head_params is None else head_params.numpy(),
                alibi_slopes=None if alibi_slopes is None else alibi_slopes.numpy(),
                normalizer=Normalizer(
                    config.scheme.normalizer, config.alpha, config.temperature_coefficients, config.entropy_threshold
                ),
                scale=options.scale_of(config),
                softcap=options.softcap_of(config),
                window=options.window,
                projections=self._take_projections(),
                stats=stats.numpy(),
                length_scale=None if factor is None else factor.numpy(),
            )
        )
        return output[None]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return the output [tokens, q_heads, head_dim] and the op's statistics [tokens, q_heads, columns]."""
        return attend_one_sequence(query, key, value, head_params, alibi_slopes, op_attributes(self.config, options))

    def _take_projections(self) -> Projections | None:
        """Return hidden states and weights per head of the layer's query and key projections, and forget them.

        Return None if not exactly two projections were seen, as in architectures with other names.
        """
        projected, self._projected = self._projected, []
        if len(projected) != 2:  # an architecture whose projections have other names
            return None
        (hidden, query_weight), (_, key_weight) = projected

        def per_head(weight: Tensor) -> Floats:
            """Return a weight [heads * head_dim, hidden_size] as [heads, head_dim, hidden_size]."""
            heads: Any = weight.detach().float().unflatten(0, (-1, self.config.head_dim)).numpy()
            return heads  # type: ignore[no-any-return]

        return Projections(hidden[0].float().numpy(), per_head(query_weight), per_head(key_weight))
