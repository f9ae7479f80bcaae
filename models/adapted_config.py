"""The folder and class of a transformers model whose attention has another norm, as `sharp adapt` writes it.

    import sharp.models.hugging_face
    AutoModelForCausalLM.from_pretrained(folder).generate(input_ids)

`config.json` has the model type "sharp_adapted", so a program that does not know the norm refuses the folder instead of
running the model with softmax. The entry "base" is the configuration of the model that was adapted, the entry "sharp"
the norm (`adapted_model.AdaptedNorm`). The weights have the base model's names. The norm's learned parameters have
`.sharp_norm.` in their names.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sharp.core.errors import InputError
from sharp.models.adapted_model import MODEL_TYPE, AdaptedNorm, attach, read_adapted_norm
from sharp.models.gated_qwen3 import GatedQwen3ForCausalLM, has_gates


class AdaptedConfig(PreTrainedConfig):
    """The configuration of an adapted model, as in the `config.json` of its folder."""

    model_type = MODEL_TYPE

    base: dict[str, Any] | None = None
    sharp: dict[str, Any] | None = None

    def base_config(self) -> PreTrainedConfig:
        """Return the configuration of the model that was adapted, with the entry `sharp`.

        Raises:
            InputError: an entry is missing or damaged.
        """
        base = dict(self.base or {})
        kind = base.pop("model_type", None)
        if not isinstance(kind, str) or kind == MODEL_TYPE:
            raise InputError("config.json has no entry 'base' with a model_type; copy the model again")
        config: PreTrainedConfig = AutoConfig.for_model(kind, **base)
        config.sharp = asdict(read_adapted_norm(self.sharp))
        return config


class _Adapted:
    """A mixin for the class of an adapted model, before the base model's class."""

    config: Any

    def __init__(self, config: PreTrainedConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)  # type: ignore[call-arg] # __init__ of the base model, which mypy does not know
        attach(self, read_adapted_norm(config.sharp))  # type: ignore[arg-type] # self is a model, by its other base class

    def save_pretrained(self, save_directory: Any, *arguments: Any, **named: Any) -> None:
        """Save the model as transformers does, but with the adapted model's `config.json`; takes the same arguments."""
        super().save_pretrained(save_directory, *arguments, **named)  # type: ignore[misc] # a method of the base model
        base = self.config.to_dict()
        sharp = base.pop("sharp")
        config = AdaptedConfig(base=base, sharp=sharp, architectures=["AdaptedForCausalLM"])
        config.save_pretrained(Path(save_directory))


def adapted_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class of adapted models of `base`, with the name and module of `base`, which transformers looks up."""
    return type(base.__name__, (_Adapted, base), {"__module__": base.__module__})


def become_adapted(model: PreTrainedModel, described: AdaptedNorm) -> None:
    """Turn `model`, which has its norms (`attach`) already, into one that is saved as an adapted model, in place."""
    model.config.sharp = asdict(described)
    # Weights of a GGUF file are floats once they are read, but with a quantizer transformers would refuse to save them.
    model.hf_quantizer = None  # type: ignore[assignment] # declared as never None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.__class__ = adapted_class(type(model))


class AdaptedForCausalLM:
    """The class that `AutoModelForCausalLM` finds for an `AdaptedConfig`, which makes models of the base's class."""

    config_class = AdaptedConfig

    @classmethod
    def from_pretrained(cls, path: Any, *arguments: Any, config: AdaptedConfig, **named: Any) -> Any:
        """Read the model in a folder; the arguments are those of transformers, `config` is that of the folder.

        Raises:
            InputError: the configuration is damaged, or of a version whose norm had other parameters.
        """
        base = config.base_config()
        named |= {"config": base, "attn_implementation": MODEL_TYPE}
        return _class_of(base).from_pretrained(path, *arguments, **named)

    @classmethod
    def _from_config(cls, config: AdaptedConfig, **named: Any) -> Any:
        """Make the model of the base config's own class, with attention replaced by the adapted norm."""
        base = config.base_config()
        named |= {"attn_implementation": MODEL_TYPE}
        return _class_of(base)._from_config(base, **named)


def _class_of(base: PreTrainedConfig) -> type[PreTrainedModel]:
    found: Any = GatedQwen3ForCausalLM if has_gates(base) else AutoModelForCausalLM._model_mapping[type(base)]
    return adapted_class(found)


AutoConfig.register(MODEL_TYPE, AdaptedConfig)
AutoModelForCausalLM.register(AdaptedConfig, AdaptedForCausalLM)
