"""The folder and class of a model of transformers whose attention has another norm: what `sharp adapt` writes.

    import sharp.models.hugging_face
    AutoModelForCausalLM.from_pretrained(folder).generate(input_ids)

`config.json` has the model type "sharp_adapted", so that a program which does not know the norm refuses the folder and
does not run it with softmax. Under "base" it has the configuration of the model that was adapted, under "sharp" the
norm (`adapted_model.AdaptedNorm`). The weights have the base model's names; what the norm learned is beside them as
`.sharp_norm.`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sharp.models.adapted_model import MODEL_TYPE, AdaptedNorm, attach, read_adapted_norm
from sharp.plugins.errors import InputError


class AdaptedConfig(PreTrainedConfig):
    """The configuration of an adapted model as it is in its folder."""

    model_type = MODEL_TYPE

    base: dict[str, Any] | None = None
    sharp: dict[str, Any] | None = None

    def base_config(self) -> PreTrainedConfig:
        """The configuration of the model that was adapted, with the entry `sharp`.

        Raises:
            InputError: it is missing or damaged.
        """
        base = dict(self.base or {})
        kind = base.pop("model_type", None)
        if not isinstance(kind, str) or kind == MODEL_TYPE:
            raise InputError("config.json has no entry 'base' with a model_type; copy the model again")
        config: PreTrainedConfig = AutoConfig.for_model(kind, **base)
        config.sharp = asdict(read_adapted_norm(self.sharp))
        return config


class _Adapted:
    """What the class of an adapted model has besides its base class's."""

    config: Any

    def __init__(self, config: PreTrainedConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)  # type: ignore[call-arg] # the base class's, of which mypy knows nothing
        attach(self, read_adapted_norm(config.sharp))  # type: ignore[arg-type] # it is a model with its base class

    def save_pretrained(self, save_directory: Any, *arguments: Any, **named: Any) -> None:
        """As transformers' own, with the adapted model's `config.json`."""
        super().save_pretrained(save_directory, *arguments, **named)  # type: ignore[misc] # as above
        base = self.config.to_dict()
        sharp = base.pop("sharp")
        config = AdaptedConfig(base=base, sharp=sharp, architectures=["AdaptedForCausalLM"])
        config.save_pretrained(Path(save_directory))


def adapted_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of `base`'s adapted models, with its name and module, which transformers looks things up by."""
    return type(base.__name__, (_Adapted, base), {"__module__": base.__module__})


def become_adapted(model: PreTrainedModel, described: AdaptedNorm) -> None:
    """Make `model`, which has its norms, one that is saved as an adapted model; in place."""
    model.config.sharp = asdict(described)
    # A GGUF file's weights are floats once they are read, but transformers would refuse to save them.
    model.hf_quantizer = None  # type: ignore[assignment] # declared as never None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.__class__ = adapted_class(type(model))


class AdaptedForCausalLM:
    """What `AutoModelForCausalLM` finds for an `AdaptedConfig`: it makes a model of the base's class."""

    config_class = AdaptedConfig

    @classmethod
    def from_pretrained(cls, path: Any, *arguments: Any, config: AdaptedConfig, **named: Any) -> Any:
        """The model in a folder; arguments as transformers' own."""
        base = config.base_config()
        named |= {"config": base, "attn_implementation": MODEL_TYPE}
        return _class_of(base).from_pretrained(path, *arguments, **named)

    @classmethod
    def _from_config(cls, config: AdaptedConfig, **named: Any) -> Any:
        base = config.base_config()
        named |= {"attn_implementation": MODEL_TYPE}
        return _class_of(base)._from_config(base, **named)


def _class_of(base: PreTrainedConfig) -> type[PreTrainedModel]:
    found: Any = AutoModelForCausalLM._model_mapping[type(base)]
    return adapted_class(found)


AutoConfig.register(MODEL_TYPE, AdaptedConfig)
AutoModelForCausalLM.register(AdaptedConfig, AdaptedForCausalLM)
