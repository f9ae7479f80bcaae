"""The reader of checkpoints of Sharp's own models: `.pt`, `.safetensors` and Hugging Face folders."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer
from torch import Tensor

from sharp.core.errors import InputError
from sharp.exporter.graph.key_bounds import key_bounds
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.norm_options import NormOptions, check_alpha
from sharp.exporter.sources.source import Source, sha256
from sharp.exporter.sources.uncached_model import UncachedEncoder, UncachedModel, UncachedNumbers, UncachedSet
from sharp.exporter.sources.unknown_keys import check_keys
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, LayerOptions
from sharp.models.byte_tokenizer import save_byte_tokenizer
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Model, read_checkpoint
from sharp.models.checkpoint_files import folder_files
from sharp.models.config import SharpConfig
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.max_retrieval import MaxRetrieval
from sharp.models.norms import get_norm

ModelT = TypeVar("ModelT", bound=Model)


class OwnDecoder(Decoder):
    """A `SharpForCausalLM`, whose own code computes every norm."""

    def __init__(self, model: SharpForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.norm_name = model.config.norm
        self.positions = self.config.positions
        self.key_bounds = key_bounds(model)

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Return final hidden states [batch, tokens, hidden]; `attention` gets each layer's bound of keys."""

        def bounded(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            head_params: Tensor | None,
            alibi_slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
        ) -> Tensor:
            """Compute attention with the layer's bound of keys among its options."""
            options = replace(options, key_bound=self.key_bounds[layer])
            return attention(layer, query, key, value, head_params, alibi_slopes, options)

        return self.model.hidden_states(input_ids, positions, bounded)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab] of hidden states [..., hidden_size]."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """Compute logits [batch, tokens, vocab] with the model's own eager attention; never None."""
        logits: Tensor = self.model(input_ids)
        return logits


def read_own_model(path: Path, norm: str | None, options: NormOptions, *, ignore: Sequence[str] = ()) -> Source:
    """Read a checkpoint of one of Sharp's own models, for an export with `norm` (None: its own) and its `options`.

    `ignore` has unknown keys that the user says change nothing. Options that are no fields of the configuration, such
    as b and n of ssa, are not set here; see `NormOptions.apply`.

    Raises:
        NotFoundError: the checkpoint, or the file of temperature coefficients, does not exist.
        InputError: the checkpoint cannot be read, has keys that may change numbers, or lacks parameters that the norm
            needs; or an option is not for the norm.
    """
    stored = read_checkpoint(path)
    config = stored.model.config
    norm = norm or config.norm
    options.check(norm)
    trained = config.norm == norm
    model = (stored.model if trained else with_norm(stored.model, norm, path)).eval()
    if norm == "fixed-temperature" and not trained and options.temperature is None:
        raise InputError(f"{path} was not trained with a fixed temperature; say which with --temperature")
    model.config = replace(model.config, **options.config_fields())
    if model.config.scheme.normalizer == "entmax":
        check_alpha(f"the alpha of {path}", model.config.alpha)
    exported = exportable(model)
    return Source(
        name=path.resolve().name if path.is_dir() else path.stem,
        architecture=type(model).__name__,
        sha256=sha256(folder_files(path) if path.is_dir() else [path]),
        model=exported,
        original=exported if trained else exportable(stored.model),
        write_tokenizer=_tokenizer_writer(path, config) if isinstance(config, SharpConfig) else None,
        unused=(check_keys(path, "its description", stored.unread, ignore=ignore),),
        task=stored.task,
        task_parameters=stored.task_parameters,
    )


def exportable(model: Model) -> Decoder | UncachedModel:
    """Wrap `model` as the decoder or the uncached model that the exporter takes."""
    if isinstance(model, SharpForCausalLM):
        return OwnDecoder(model)
    if isinstance(model, SharpForMaskedLM):
        return UncachedEncoder(model)
    return UncachedSet(model) if isinstance(model, MaxRetrieval) else UncachedNumbers(model)


def _tokenizer_writer(path: Path, config: SharpConfig) -> Callable[[Path], object] | None:
    """Return a function that writes the tokenizer into a folder; None if the model has no tokenizer.

    The tokenizer is `tokenizer.json` in the folder `path`, or else the one that the configuration names.

    Raises:
        InputError: `tokenizer.json` cannot be read.
    """
    beside = path / "tokenizer.json"
    if not beside.is_file():
        return save_byte_tokenizer if config.tokenizer == "bytes" else None
    try:
        tokenizer = Tokenizer.from_file(str(beside))
    except Exception as error:  # tokenizers raises no narrower class
        raise InputError(f"{beside} cannot be read as a tokenizer; save it again") from error
    return lambda folder: tokenizer.save(str(folder / "tokenizer.json"))


def with_norm(model: ModelT, norm: str, path: Path) -> ModelT:
    """Return a new model with the same weights and another norm, whose parameters have their start values.

    `path` is for messages.

    Raises:
        InputError: the norm learns projections or exponents, and no start value of these preserves the model.
    """
    scheme = get_norm(norm)
    if scheme.scale_kind in ("head", "token"):
        raise InputError(
            f"{path} was trained with --norm {model.config.norm} and has no parameters for {norm}; "
            f"export it with --norm {model.config.norm}, or train the model with {norm} first"
        )
    config = replace(model.config, norm=norm, alpha=scheme.alpha, gamma=None)
    changed: ModelT = type(model)(config)  # type: ignore[arg-type] # the class of this very configuration
    own = {name for name in changed.state_dict() if "head_parameters" in name or "query_scale" in name}
    missing, _ = changed.load_state_dict(model.state_dict(), strict=False)
    assert set(missing) <= own
    return changed
