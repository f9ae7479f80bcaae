"""A decoder whose heads differ in their norm (`--norm-map`)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sharp.core import manifest
from sharp.core.errors import InputError
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.head_parts import HeadPart, split
from sharp.exporter.sources.hook import check_uncapped
from sharp.exporter.sources.norm_map import HeadMap, map_heads, read_norm_map
from sharp.exporter.sources.norm_options import norm_parameters
from sharp.exporter.sources.source import Source
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, LayerOptions
from sharp.models.norms import ScaleKind
from sharp.models.query_scale import LOG_LENGTH_OFFSET, QueryScale
from sharp.models.ssa_parameters import SSA_START
from sharp.plugins.op.attributes import has_place_for_sink


class MappedDecoder(Decoder):
    """A decoder with other norms in some heads. Heads that no entry of the map names keep the model's own norm.

    `path` is the file of the norm map, for messages and `norm_name`.

    Raises:
        InputError: the model's own norm scales the query, which the mapped heads could not undo, or its heads have
            sinks and a norm has no place for them, or its heads differ in their norm already.
    """

    def __init__(self, decoder: Decoder, heads: HeadMap, path: Path) -> None:
        super().__init__()
        config = decoder.config
        if config.scheme.scale_kind != "none":
            raise InputError(
                f"--norm-map {path} goes with a --norm that does not scale the query, and {config.norm} does; "
                "choose --norm softmax and name ssmax in the file"
            )
        named = {norm.config for norms in heads.layers for norm in norms}
        without = {config.norm for config in named if not has_place_for_sink(config.scheme.normalizer)}
        if decoder.has_sinks and without:
            raise InputError(
                f"the model has attention sinks, which compete with its keys, and under {sorted(without)[0]}, which "
                f"--norm-map {path} names, nothing competes; choose another norm for these heads"
            )
        if decoder.head_norms():
            raise InputError(f"the model's heads differ in their norm already; leave out --norm-map {path}")
        self.decoder = decoder
        self.has_sinks = decoder.has_sinks
        self.routed = decoder.routed
        self.config = config
        self.positions = decoder.positions
        self.norm_name = f"{config.norm} and {path.name}"
        self.heads = heads
        self.nodes = tuple(heads.nodes(layer) for layer in range(config.layers))
        self.parts = tuple(split(config, norms) for norms in self.nodes)
        self.scales = nn.ModuleList(nn.ModuleList(self._scales(layer)) for layer in range(config.layers))
        starts = torch.zeros(config.layers, config.q_heads, 2)
        mapped = torch.zeros(config.layers, config.q_heads, 1, dtype=torch.bool)
        for layer, (norms, entries) in enumerate(zip(heads.layers, heads.entries, strict=True)):
            for norm, entry in zip(norms, entries, strict=True):
                if entry is not None:
                    given = (entry.options.ssa_b, entry.options.ssa_n)
                    pair = [start if value is None else value for value, start in zip(given, SSA_START, strict=True)]
                    starts[layer, list(norm.heads)] = torch.tensor(pair)
                    mapped[layer, list(norm.heads)] = True
        self.register_buffer("ssa", starts, persistent=False)
        self.register_buffer("mapped", mapped, persistent=False)

    ssa: Tensor
    mapped: Tensor

    def _scales(self, layer: int) -> Iterator[QueryScale]:
        """Yield a layer's length scale for the heads with norm ssmax, then for those with ssmax-bias, where it has any.

        Each scale is 1 in all other heads.
        """
        config = self.config
        kinds: tuple[ScaleKind, ...] = ("length", "length-bias")
        for kind in kinds:
            offsets: dict[int, int] = {}
            for norm, entry in zip(self.heads.layers[layer], self.heads.entries[layer], strict=True):
                if entry is not None and norm.config.scheme.scale_kind == kind:
                    given = entry.options.log_length_offset
                    offsets |= dict.fromkeys(norm.heads, LOG_LENGTH_OFFSET if given is None else given)
            if offsets:
                every = range(config.q_heads)
                scale = QueryScale(
                    kind, config.hidden_size, [head in offsets for head in every], config.trained_context
                )
                scale.log_length_offset = torch.tensor([offsets.get(head, LOG_LENGTH_OFFSET) for head in every])
                yield scale

    def head_norms(self) -> tuple[manifest.HeadNorm, ...]:
        """Return the manifest's entries for the heads that the norm map names."""
        return tuple(
            manifest.HeadNorm(
                layer=layer,
                heads=norm.heads,
                name=norm.config.norm,
                normalizer=norm.config.scheme.normalizer,
                alpha=norm.config.alpha,
                temperature_coefficients=norm.config.temperature_coefficients,
                entropy_threshold=norm.config.entropy_threshold,
                temperature=norm.config.temperature,
                parameters=norm_parameters(norm.config, entry.options, trained=False),
            )
            for layer, (norms, entries) in enumerate(zip(self.heads.layers, self.heads.entries, strict=True))
            for norm, entry in zip(norms, entries, strict=True)
            if entry is not None
        )

    def layer_parts(self, layer: int) -> tuple[HeadPart, ...]:
        """Return the parts of a layer whose heads have the norms of the map."""
        return self.parts[layer]

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Compute hidden states [batch, tokens, hidden] by the inner decoder, with the mapped norms in its attention.

        `attention` gets the norms of the heads in its options.

        Raises:
            InputError: a layer caps its logits, and a norm of its heads scales them with the length.
        """

        def mapped(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            head_params: Tensor | None,
            alibi_slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
        ) -> Tensor:
            """Compute attention of a layer with its norms per head among the options."""
            norms = self.nodes[layer]
            for norm in norms:
                if norm.config.scheme.scale_kind != "none":
                    check_uncapped(norm.config.norm, options)
            for scale in self.scales[layer]:  # type: ignore[attr-defined]  # a ModuleList
                factor = scale(positions, positions)
                query = query * factor.unsqueeze(-1).to(query.dtype)
                # The scales of ssmax and ssmax-bias are for different heads and 1 elsewhere, so their product is exact.
                factor = factor if options.query_factor is None else options.query_factor * factor
                options = replace(options, query_factor=factor)
            params = None
            if any(norm.config.scheme.head_parameters for norm in norms):
                own = self.ssa[layer]
                params = own if head_params is None else torch.where(self.mapped[layer], own, head_params)
            return attention(layer, query, key, value, params, alibi_slopes, replace(options, norms=norms))

        return self.decoder.hidden_states(input_ids, positions, mapped)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab] of hidden states [..., hidden_size], by the inner decoder."""
        return self.decoder.logits(hidden)

    def own_logits(self, _input_ids: Tensor) -> Tensor | None:
        """Return None, because the source's own code has no mapped norms."""
        return None


def with_norm_map(source: Source, norm_map: Path, path: Path) -> Source:
    """Return `source`, which was read from `path`, with the norms of the file `norm_map` in the heads that it names.

    The result counts as not trained with its norms (`Source.trained`).

    Raises:
        NotFoundError: there is no file `norm_map`, or no file of temperature coefficients that it names.
        InputError: the map is not valid, does not fit the model, or the model is no decoder.
    """
    if not isinstance(source.model, Decoder):
        raise InputError(f"{path} holds a {source.architecture}; --norm-map is for decoders, leave it out")
    heads = map_heads(source.model.config, read_norm_map(norm_map), norm_map)
    return replace(source, model=MappedDecoder(source.model, heads, norm_map))
