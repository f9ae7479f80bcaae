"""Checkpoints of our own `SharpForCausalLM`: `.pt` and `.safetensors`."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from sharp.exporter.decoder import Decoder, Source
from sharp.exporter.digest import sha256
from sharp.models.byte_tokenizer import byte_tokenizer
from sharp.models.causal_lm import AttentionFunction, SharpForCausalLM
from sharp.models.checkpoint import load_checkpoint
from sharp.models.normalizers import get_norm
from sharp.plugins.errors import InputError


class OwnDecoder(Decoder):
    """A `SharpForCausalLM`; it has every norm itself."""

    def __init__(self, model: SharpForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """See `Decoder`."""
        return self.model.hidden_states(input_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder`."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """By the model's own eager attention."""
        logits: Tensor = self.model(input_ids)
        return logits


def read_own_model(path: Path, norm: str) -> Source:
    """Read a checkpoint of ours, to be exported with `norm`.

    Raises:
        InputError: the checkpoint cannot be read, or the norm needs parameters that it lacks.
    """
    model = load_checkpoint(path)
    trained = model.config.norm == norm
    decoder = OwnDecoder((model if trained else with_norm(model, norm, path)).eval())
    has_bytes = model.config.vocab_size >= byte_tokenizer().get_vocab_size()
    return Source(
        name=path.stem,
        architecture=type(model).__name__,
        sha256=sha256([path]),
        decoder=decoder,
        trained=trained,
        write_tokenizer=(lambda folder: byte_tokenizer().save(str(folder / "tokenizer.json"))) if has_bytes else None,
    )


def with_norm(model: SharpForCausalLM, norm: str, path: Path) -> SharpForCausalLM:
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
    changed = SharpForCausalLM(replace(model.config, norm=norm, alpha=scheme.alpha))
    own = {name for name in changed.state_dict() if "head_parameters" in name or "query_scale" in name}
    missing, _ = changed.load_state_dict(model.state_dict(), strict=False)
    assert set(missing) <= own
    return changed
