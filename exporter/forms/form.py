"""The forms that a model can be exported in (`--cache`): how each is traced, verified and described."""

from pathlib import Path
from typing import Protocol, get_args

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.source import Source
from sharp.exporter.checkpoints.uncached_model import UncachedDecoder, UncachedModel
from sharp.exporter.forms.contiguous.cases import ContiguousVerifier
from sharp.exporter.forms.contiguous.model import contiguous_ports, trace_contiguous
from sharp.exporter.forms.paged.cases import PagedVerifier
from sharp.exporter.forms.paged.model import trace_paged
from sharp.exporter.forms.uncached.cases import UncachedVerifier
from sharp.exporter.forms.uncached.model import COLLECT_STATS, STATS, trace_uncached
from sharp.exporter.graph.graph_options import DEFAULT_GRAPH, GraphOptions
from sharp.exporter.graph.key_screens import screened_caches
from sharp.exporter.graph.lowering import Tracing
from sharp.exporter.verification.verifier import Verifier
from sharp.models.config import SharpConfig
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import Cache, CacheForm, ModelKind, Port, PositionScheme, Target

FORMS = get_args(CacheForm)
SCREENED_CONTEXT = 8192  # tokens; shorter ones gain little


class Form(Protocol):
    """A model in one of its forms."""

    kind: ModelKind
    config: SharpConfig
    positions: PositionScheme
    cache: Cache
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def trace(self) -> Tracing:
        """What torch.onnx.export needs."""
        ...

    def verifier(self) -> Verifier:
        """What compares the written model with PyTorch."""
        ...


class PagedForm:
    """A decoder with a paged cache: what the server runs."""

    kind: ModelKind = "decoder"
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()

    def __init__(self, decoder: Decoder, options: GraphOptions, target: Target = "onnxruntime") -> None:
        screened = options.key_screen == "int8" or (
            options.key_screen == "auto"
            and target == "onnxruntime"
            and options.cache_dtype == "float32"  # in 16 bits it gains less, and costs twice the share of memory
            and decoder.config.positions not in ("alibi", "nape")  # most strips stay in doubt: it was slower
            and (options.max_context or decoder.config.max_context) >= SCREENED_CONTEXT
        )
        self.decoder = decoder
        self.config = decoder.config
        self.positions = decoder.positions
        heads = decoder.cache_heads
        self.cache = Cache(
            form="paged",
            block_size=options.block_size,
            dtype=options.cache_dtype,
            heads=() if heads == (self.config.kv_heads,) * self.config.layers else heads,
            key_screens=screened_caches(decoder) if screened else (),
        )

    def trace(self) -> Tracing:
        """See `Form`."""
        return trace_paged(self.decoder, self.cache)

    def verifier(self) -> Verifier:
        """See `Form`."""
        return PagedVerifier(self.decoder, self.cache)


class ContiguousForm:
    """A decoder with a past and a present per layer: what other tools read."""

    kind: ModelKind = "decoder"
    cache = Cache(form="contiguous")

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self.positions = decoder.positions
        self.inputs, self.outputs = contiguous_ports(decoder)

    def trace(self) -> Tracing:
        """See `Form`."""
        return trace_contiguous(self.decoder)

    def verifier(self) -> Verifier:
        """See `Form`."""
        return ContiguousVerifier(self.decoder)


class UncachedForm:
    """Any model over whole sequences or sets."""

    cache = Cache(form="none")

    def __init__(self, model: UncachedModel) -> None:
        self.model = model
        self.kind: ModelKind = model.kind
        self.config = model.config
        self.positions = model.positions
        collect = Port(name=COLLECT_STATS, dtype="bool", shape=(), doc="whether to compute stats; false if not fed")
        self.inputs = (*model.inputs, collect)
        shape = (self.config.layers, "batch", self.config.q_heads, model.queries, 4)
        doc = "entropy in nats, support, inverse temperature, logit spread"
        self.outputs: tuple[Port, ...] = (model.output, Port(name=STATS, dtype="float32", shape=shape, doc=doc))

    def trace(self) -> Tracing:
        """See `Form`."""
        return trace_uncached(self.model)

    def verifier(self) -> Verifier:
        """See `Form`."""
        return UncachedVerifier(self.model)


def make_form(
    cache: str, source: Source, path: Path, options: GraphOptions = DEFAULT_GRAPH, target: Target = "onnxruntime"
) -> Form:
    """The model of `source`, read from `path`, in the form that `--cache` names.

    Raises:
        InputError: there is no such form, or the model cannot have it.
    """
    if cache not in FORMS:
        raise InputError(f"--cache is {cache!r}, but must be one of: {', '.join(FORMS)}")
    model = source.model
    if cache == "none":
        return UncachedForm(UncachedDecoder(model) if isinstance(model, Decoder) else model)
    if source.no_cache is not None:
        raise InputError(f"{path} cannot have a cache: {source.no_cache}; export it with --cache none")
    if not isinstance(model, Decoder):
        raise InputError(f"{path} holds a {source.architecture}, which has no cache; export it with --cache none")
    if cache != "paged":
        return ContiguousForm(model)
    form = PagedForm(model, options, target)
    if options.key_screen == "int8" and not form.cache.key_screens:
        raise InputError(f"{path} has no head with norm entmax, sparsemax or one like them; leave --key-screen out")
    return form
