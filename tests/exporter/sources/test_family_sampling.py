"""The recommendations for families, found by the names that their checkpoints have on the Hugging Face Hub."""

import pytest

from sharp.exporter.sources.family_sampling import family_sampling

# What the authors' own pages say of each model.
PUBLISHED = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": {"temperature": 0.2, "top_p": 0.9},
    "SmolLM3-3B": {"temperature": 0.6, "top_p": 0.95},
    "DeepSeek-R1-Distill-Llama-8B": {"temperature": 0.6, "top_p": 0.95},
    "DeepSeek-R1-Distill-Qwen-1.5B-Q4_K_M.gguf": {"temperature": 0.6, "top_p": 0.95},
    "Qwen3-0.6B": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "Qwen3-4B-Instruct-2507": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "Qwen3-4B-Thinking-2507": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "qwen2.5-0.5b-instruct-q8_0.gguf": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "Meta-Llama-3-8B-Instruct": {"temperature": 0.6, "top_p": 0.9},
    "Llama-3.2-1B-Instruct": {"temperature": 0.6, "top_p": 0.9},
    "gemma-3-270m-it": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    "EXAONE-Deep-2.4B": {"temperature": 0.6, "top_p": 0.95},
    "gpt-oss-20b": {"temperature": 1.0, "top_p": 1.0},
    "zephyr-7b-beta": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "TinyLlama-1.1B-Chat-v1.0": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_a_familys_recommendation_is_that_of_its_authors(name, published):
    found = family_sampling(name)
    assert found is not None
    assert found.sampling.model_dump(exclude_none=True) == published


@pytest.mark.parametrize(
    "name",
    [
        *("tiny", "SmolLM2-135M", "SmolLM3-3B-Base", "Qwen3-0.6B-Base", "Qwen3-Embedding-0.6B", "Qwen2.5-7B"),
        *("Llama-3.1-8B", "Llama-Guard-3-8B", "gemma-3-1b-pt", "gemma-2-2b-it", "Hermes-3-Llama-3.1-8B"),
        *("Llama-3.1-Nemotron-Nano-8B-v1", "Qwen2-VL-2B-Instruct", "TinyLlama-1.1B-intermediate-step-1431k-3T"),
    ],
)
def test_base_models_and_those_of_others_have_none(name):
    assert family_sampling(name) is None
