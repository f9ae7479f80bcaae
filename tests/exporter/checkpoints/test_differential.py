"""DiffLlama's attention is one call of the op per layer, whose heads are those of both attention maps."""

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from sharp import LLM, SamplingParams
from sharp.core.manifest import read_manifest
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.exporter.forms.paged.session import PagedSession
from tests.exporter.checkpoints.test_gates import expected
from tests.exporter.greedy import NEW_TOKENS, PROMPT, export, greedy, greedy_of_transformers
from tests.exporter.tiny_hugging_face import save, tiny
from tests.marks import full


@pytest.mark.parametrize(
    ("norm", "options"), [("entmax", ()), full("sparsemax", ("--kv-dtype", "float32", "--block-size", "32"))]
)
def test_both_maps_have_the_norm_and_their_statistics(sharp_export, tmp_path, norm, options):
    source = save(tiny("diffllama"), tmp_path / "in")
    folder = export(sharp_export, source, norm, "paged", tmp_path / "out", "--untrained-norm", *options)
    original = AutoModelForCausalLM.from_pretrained(source).eval()  # transformers' class, with two calls per layer
    tokens, logits, entropies = expected(original, norm)
    manifest = read_manifest(folder)
    assert (manifest.layers, manifest.q_heads, manifest.head_dim, manifest.value_dim) == (2, 8, 12, 24)
    session = PagedSession(folder, manifest, manifest.cache, kernels=True)
    session.reset(1, len(tokens))
    steps = [session.step([np.array(part)]) for part in (tokens[:5], tokens[5:9], *([t] for t in tokens[9:-1]))]
    found = np.concatenate([step[0][0] for step in steps])
    assert np.abs(found - logits).max() <= 2e-4 * np.abs(logits).max()
    assert found[PROMPT.shape[1] - 1 :].argmax(-1).tolist() == tokens[PROMPT.shape[1] :]
    measured = np.concatenate([step[1][0][..., 0] for step in steps], axis=1)
    np.testing.assert_allclose(measured, entropies[::2], atol=2e-4)  # the second call of a layer has the same weights
    assert np.abs(measured[..., :4] - measured[..., 4:]).max() > 0.1  # the two maps differ


def test_a_server_generates_the_tokens_of_transformers(sharp_export, tmp_path):
    model = tiny("diffllama")
    folder = export(sharp_export, save(model, tmp_path / "in"), "softmax", "paged", tmp_path / "out")
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    [completion] = LLM(folder).generate([PROMPT[0].tolist()], params, attention=True)
    assert completion.attention.entropy.shape == (2, 8)
    assert list(completion.token_ids) == greedy_of_transformers(model)


@pytest.mark.parametrize("cache", ["contiguous", full("none")])
def test_other_forms_generate_the_tokens_of_transformers(sharp_export, tmp_path, cache):
    model = tiny("diffllama", num_hidden_layers=1)
    folder = export(sharp_export, save(model, tmp_path / "in"), "softmax", cache, tmp_path / "out")
    assert greedy(folder, cache, read_manifest(folder)) == greedy_of_transformers(model)
    if cache == "contiguous":
        found = ContiguousSession(folder, kernels=False).generate(PROMPT, NEW_TOKENS)[0].tolist()
        assert found == greedy_of_transformers(model)
        assert not (folder / "genai_config.json").exists()  # it has one head_size for keys and values
