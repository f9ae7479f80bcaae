"""The forms that a model can be exported in (`--cache`), with the ways to trace, verify and describe each."""

from pathlib import Path
from typing import Protocol, get_args

from sharp.core.errors import InputError
from sharp.core.manifest import Cache, CacheForm, ModelKind, Port, PositionScheme, Target
from sharp.exporter.forms.contiguous.cases import ContiguousVerifier
from sharp.exporter.forms.contiguous.model import contiguous_ports, trace_contiguous
from sharp.exporter.forms.paged.cases import PagedVerifier
from sharp.exporter.forms.paged.model import trace_paged
from sharp.exporter.forms.uncached.cases import UncachedVerifier
from sharp.exporter.forms.uncached.model import COLLECT_STATS, STATS, trace_uncached
from sharp.exporter.graph.graph_options import DEFAULT_GRAPH, GraphOptions
from sharp.exporter.graph.key_screens import screened_caches
from sharp.exporter.graph.lowering import TraceableModule
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.source import Source
from sharp.exporter.sources.uncached_model import UncachedDecoder, UncachedModel
from sharp.exporter.verification.verifier import Verifier
from sharp.models.config import SharpConfig

FORMS = get_args(CacheForm)
SCREENED_CONTEXT = 8192  # tokens; with shorter contexts a key screen gains little


class Form(Protocol):
    """A model in one form. `inputs` and `outputs` are the ports of the manifest, empty for the paged form."""

    kind: ModelKind
    config: SharpConfig
    positions: PositionScheme
    cache: Cache
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def trace(self) -> TraceableModule:
        """Return the module, example arguments and names that torch.onnx.export needs."""
        ...

    def verifier(self) -> Verifier:
        """Return the verifier, which compares the written model with PyTorch."""
        ...


class PagedForm:
    """A decoder with a paged cache, which the server runs."""

    kind: ModelKind = "decoder"
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()

    def __init__(self, decoder: Decoder, options: GraphOptions, target: Target = "onnxruntime") -> None:
        screened = options.key_screen == "int8" or (
            options.key_screen == "auto"
            and target == "onnxruntime"
            and options.cache_dtype == "float32"  # with 16 bits a screen gains less and takes twice the share of memory
            and decoder.config.positions not in ("alibi", "nape")  # the screen decides few strips, so it was slower
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

    def trace(self) -> TraceableModule:
        """Return the tracing of the decoder over paged caches."""
        return trace_paged(self.decoder, self.cache)

    def verifier(self) -> Verifier:
        """Return the verifier of the paged form."""
        return PagedVerifier(self.decoder, self.cache)


class ContiguousForm:
    """A decoder with past and present tensors per layer, which other tools read."""

    kind: ModelKind = "decoder"
    cache = Cache(form="contiguous")

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self.positions = decoder.positions
        self.inputs, self.outputs = contiguous_ports(decoder)

    def trace(self) -> TraceableModule:
        """Return the tracing of the decoder over past and present tensors."""
        return trace_contiguous(self.decoder)

    def verifier(self) -> Verifier:
        """Return the verifier of the contiguous form."""
        return ContiguousVerifier(self.decoder)


class UncachedForm:
    """Any model over whole sequences or sets, without a cache."""

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

    def trace(self) -> TraceableModule:
        """Return the tracing of the model over whole inputs."""
        return trace_uncached(self.model)

    def verifier(self) -> Verifier:
        """Return the verifier of the form without a cache."""
        return UncachedVerifier(self.model)


def make_form(
    cache: str, source: Source, path: Path, options: GraphOptions = DEFAULT_GRAPH, target: Target = "onnxruntime"
) -> Form:
    """Return the model of `source`, which was read from `path`, in the form that `--cache` names.

    Raises:
        InputError: there is no such form, or the model cannot have this form.
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
