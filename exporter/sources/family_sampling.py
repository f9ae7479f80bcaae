"""The sampling parameters that the authors of known families recommend, for checkpoints that carry none themselves."""

import re
from dataclasses import dataclass

from sharp.core.manifest import SamplingDefaults

CHAT = r".*(instruct|chat|[-_]it\b)"


@dataclass(frozen=True)
class FamilySampling:
    """The recommendation for a family of models.

    Attributes:
        family: the name of the family.
        pattern: matches the names of its checkpoints, in lower case.
        sampling: the recommended parameters.
        source: the page on which the authors recommend them.
    """

    family: str
    pattern: str
    sampling: SamplingDefaults
    source: str


def _card(model: str) -> str:
    """Return the words that name a model card as the source of sampling settings."""
    return f"the model card of {model}"


# The first match counts: names of distilled and fine-tuned models also contain the name of the model that they began
# with. Base models have no recommendation.
FAMILIES = (
    FamilySampling(
        "DeepSeek-R1",
        r"deepseek[-_ ]?r1",
        SamplingDefaults(temperature=0.6, top_p=0.95),
        _card("deepseek-ai/DeepSeek-R1"),
    ),
    FamilySampling(
        "SmolLM2",
        "smollm2" + CHAT,
        SamplingDefaults(temperature=0.2, top_p=0.9),
        _card("HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    ),
    FamilySampling(
        "SmolLM3",
        r"smollm3(?!.*base)",
        SamplingDefaults(temperature=0.6, top_p=0.95),
        _card("HuggingFaceTB/SmolLM3-3B"),
    ),
    FamilySampling(
        "Qwen3 without thoughts",
        r"qwen3(?!\.)(?=.*(instruct|coder))",
        SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20),
        _card("Qwen/Qwen3-4B-Instruct-2507"),
    ),
    FamilySampling(
        "Qwen3",
        r"qwen3(?!\.)(?!.*(base|embedding|reranker))",
        SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20),
        _card("Qwen/Qwen3-8B"),
    ),
    FamilySampling(
        "Qwen2.5",
        r"qwen2(\.5)?(?!.*(vl|audio))" + CHAT,
        SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20),
        "generation_config.json of Qwen/Qwen2.5-7B-Instruct",
    ),
    FamilySampling(
        "Llama 3",
        r"llama[-_ ]?3(?!.*guard)" + CHAT,
        SamplingDefaults(temperature=0.6, top_p=0.9),
        "generation_config.json of meta-llama/Llama-3.1-8B-Instruct",
    ),
    FamilySampling(
        "Gemma 3",
        "gemma[-_ ]?3" + CHAT,
        SamplingDefaults(temperature=1.0, top_k=64, top_p=0.95),
        "generation_config.json of google/gemma-3-4b-it",
    ),
    FamilySampling(
        "EXAONE Deep",
        "exaone[-_ ]?deep",
        SamplingDefaults(temperature=0.6, top_p=0.95),
        _card("LGAI-EXAONE/EXAONE-Deep-7.8B"),
    ),
    FamilySampling(
        "gpt-oss",
        "gpt[-_ ]?oss",
        SamplingDefaults(temperature=1.0, top_p=1.0),
        "the README of openai/gpt-oss",
    ),
    FamilySampling(
        "Zephyr",
        "zephyr[-_ ]?7b",
        SamplingDefaults(temperature=0.7, top_k=50, top_p=0.95),
        _card("HuggingFaceH4/zephyr-7b-beta"),
    ),
    FamilySampling(
        "TinyLlama",
        "tinyllama" + CHAT,
        SamplingDefaults(temperature=0.7, top_k=50, top_p=0.95),
        _card("TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    ),
)


def family_sampling(name: str) -> FamilySampling | None:
    """Return the recommendation for a checkpoint by the name of its file or folder, or None for an unknown family."""
    lowered = name.lower()
    if re.search(r"hermes|nemotron", lowered):  # fine-tuned by others, who recommend other values
        return None
    return next((family for family in FAMILIES if re.search(family.pattern, lowered)), None)
