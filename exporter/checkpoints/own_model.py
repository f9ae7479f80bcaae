"""Checkpoints of our own models: `.pt`, `.safetensors` and Hugging Face folders."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer
from torch import Tensor

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.norm_options import NormOptions, check_alpha
from sharp.exporter.checkpoints.source import Source, sha256
from sharp.exporter.checkpoints.uncached_model import UncachedEncoder, UncachedModel, UncachedNumbers, UncachedSet
from sharp.exporter.graph.key_bounds import key_bounds
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, LayerOptions
from sharp.models.byte_tokenizer import save_byte_tokenizer
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Model, read_checkpoint
from sharp.models.checkpoint_files import folder_files
from sharp.models.config import SharpConfig
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.max_retrieval import MaxRetrieval
from sharp.models.norms import get_norm
from sharp.plugins.errors import InputError

ModelT = TypeVar("ModelT", bound=Model)


class OwnDecoder(Decoder):
    """A `SharpForCausalLM`; it has every norm itself."""

    def __init__(self, model: SharpForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.norm_name = model.config.norm
        self.positions = self.config.positions
        self.key_bounds = key_bounds(model)

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """See `Decoder`."""

        def bounded(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            head_params: Tensor | None,
            alibi_slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
        ) -> Tensor:
            options = replace(options, key_bound=self.key_bounds[layer])
            return attention(layer, query, key, value, head_params, alibi_slopes, options)

        return self.model.hidden_states(input_ids, positions, bounded)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder`."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """By the model's own eager attention."""
        logits: Tensor = self.model(input_ids)
        return logits


def read_own_model(path: Path, norm: str | None, options: NormOptions) -> Source:
    """Read a checkpoint of ours, to be exported with `norm` (None: its own), set up with `options`.

    Raises:
        InputError: the checkpoint cannot be read, or the norm needs parameters that it lacks.
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
        task=stored.task,
        task_parameters=stored.task_parameters,
    )


def exportable(model: Model) -> Decoder | UncachedModel:
    """`model` in the form that it is exported from."""
    if isinstance(model, SharpForCausalLM):
        return OwnDecoder(model)
    if isinstance(model, SharpForMaskedLM):
        return UncachedEncoder(model)
    return UncachedSet(model) if isinstance(model, MaxRetrieval) else UncachedNumbers(model)


def _tokenizer_writer(path: Path, config: SharpConfig) -> Callable[[Path], object] | None:
    """What writes the tokenizer: the one beside the weights, else the one that the configuration names, if any."""
    beside = path / "tokenizer.json"
    if not beside.is_file():
        return save_byte_tokenizer if config.tokenizer == "bytes" else None
    try:
        tokenizer = Tokenizer.from_file(str(beside))
    except Exception as error:  # tokenizers raises nothing narrower
        raise InputError(f"{beside} cannot be read as a tokenizer; save it again") from error
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise InputError(
            f"{beside} has {tokenizer.get_vocab_size()} tokens, but the model's vocab_size is {config.vocab_size}; "
            "give the tokenizer that the model was trained with"
        )
    return lambda folder: tokenizer.save(str(folder / "tokenizer.json"))


def with_norm(model: ModelT, norm: str, path: Path) -> ModelT:
    """The same weights under another norm, whose own parameters get their start values.

    Raises:
        InputError: the norm's parameters are projections or exponents, for which no start value keeps the model.
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
