import numpy as np
import pytest

from sharp.core.manifest import read_manifest
from sharp.serving.api.errors import InputError, NotFoundError
from sharp.serving.backends import StepInputs, load_backend
from sharp.serving.backends.cache_size import bytes_per_block, cache_blocks
from sharp.serving.config import BackendConfig, EngineConfig, ServerConfig

CONFIG = BackendConfig(threads=1, kernels=False)


@pytest.fixture
def backend(counting):
    backend = load_backend(counting, read_manifest(counting), CONFIG)
    backend.allocate_cache(4)
    return backend


def decode(tokens, context, blocks, **changes):
    """Return a batch of one sequence that computes `tokens` after `context` earlier tokens."""
    positions = np.arange(context, context + len(tokens))
    batch = {
        "input_ids": np.array(tokens, np.int64),
        "positions": positions,
        "slot_mapping": np.array([blocks[p // 4] * 4 + p % 4 for p in positions], np.int32),
        "block_table": np.array([blocks], np.int32),
        "query_start": np.array([0, len(tokens)], np.int32),
        "context_lens": np.array([context], np.int32),
        "logits_indices": np.array([len(tokens) - 1]),
        "collect_stats": False,
    }
    return StepInputs(**{**batch, **changes})


def test_the_cache_keeps_what_earlier_steps_wrote(backend):
    backend.step(decode([1, 2, 3, 4, 5], 0, [2, 0]))
    backend.step(decode([50], 0, [3]))
    output = backend.step(decode([6], 5, [2, 0]))
    assert output.logits.shape == (1, 257)
    assert output.logits.argmax() == 7
    assert backend._current[1].numpy()[[2, 0], 0, :, 0].ravel()[:6].tolist() == [1, 2, 3, 4, 5, 6]


def test_statistics_only_when_requested(backend):
    assert backend.step(decode([1, 2], 0, [0])).stats is None
    stats = backend.step(decode([1, 2], 0, [0], collect_stats=True)).stats
    np.testing.assert_allclose(stats[0, :, 0, 0], np.log([1, 2]), rtol=1e-6)


def test_a_cpu_returns_logits_where_a_gpu_would_sample(backend):
    output = backend.step_and_sample(decode([1, 2, 3], 0, [0]), np.array([(1.0, 0, 1, 0, 0.5)]), None)
    assert output.sampled is None and output.logits.shape == (1, 257)


def test_a_failed_step_did_not_happen(backend):
    backend.step(decode([1, 2, 3], 0, [1]))
    with pytest.raises(Exception, match="indices"):
        backend.step(decode([9], 3, [1], slot_mapping=np.array([99], np.int32)))
    assert backend.step(decode([4], 3, [1])).logits.argmax() == 5
    assert backend._current[1].numpy()[1, 0, :, 0].tolist() == [1, 2, 3, 4]


def test_a_backend_that_does_not_exist(counting):
    with pytest.raises(NotFoundError, match="no backend 'abacus'; there are: onnxruntime, tensorrt"):
        load_backend(counting, read_manifest(counting), BackendConfig(name="abacus"))


def test_a_model_of_another_shape_is_refused(counting):
    manifest = read_manifest(counting).model_copy(update={"layers": 2})
    with pytest.raises(InputError, match=r"lacks key_cache\.1, key_cache_out\.1"):
        load_backend(counting, manifest, CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, r"logits of the model has shape \['outputs', 257\].*\['any', 300\]"),
        ({"q_heads": 4}, r"stats of the model has shape \[1, 'tokens', 2, 4\]"),
        ({"head_dim": 8}, r"key_cache\.0 of the model has shape"),
        ({"value_dim": 8}, r"value_cache\.0 of the model has shape"),
    ],
)
def test_a_manifest_of_another_model_is_refused(counting, changes, message):
    with pytest.raises(InputError, match=message):
        load_backend(counting, read_manifest(counting).model_copy(update=changes), CONFIG)


def test_cache_size(counting):
    manifest = read_manifest(counting)
    block_bytes = bytes_per_block(manifest)
    assert cache_blocks(manifest, 10, 10**9) == 3
    assert cache_blocks(manifest, None, 10**9) == 16 * 2048 // 4
    assert cache_blocks(manifest, None, 100 * block_bytes) == 50
    assert cache_blocks(manifest, None, 100 * block_bytes, "cuda") == 90
    assert cache_blocks(manifest, None, 10**9, "cuda") == int(0.9 * 10**9) // block_bytes
    long = manifest.model_copy(update={"max_context": 100_000})
    assert cache_blocks(long, None, 10**9) == 25_000
    with pytest.raises(InputError, match="cache_tokens is 1000, which needs"):
        cache_blocks(manifest, 1000, 100 * block_bytes)


def test_key_screens_count_in_the_cache_size_where_the_backend_has_them(counting):
    manifest = read_manifest(counting)
    without = bytes_per_block(manifest)
    cache = manifest.cache.model_copy(update={"key_screens": (0,)})
    screened = manifest.model_copy(update={"cache": cache})
    both = bytes_per_block(screened)
    # per head, 4 keys of one channel: a word of 4 bytes for the channel, and 8 bytes of scale and distance
    assert both - without == manifest.kv_heads * 4 * (4 + 8)
    assert bytes_per_block(screened, screened=False) == without
    assert cache_blocks(screened, None, 100 * both, "cuda") == 90
    assert cache_blocks(screened, None, 100 * without, "cuda", screened=False) == 90


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: EngineConfig(max_sequences=0), "max_sequences is 0; it must be at least 1"),
        (lambda: BackendConfig(threads=100_000), "threads is 100000; it must be at most 1024"),
        (lambda: EngineConfig(max_batch_tokens=8, max_sequences=9), "max_batch_tokens is 8; it must be at least 9"),
        (lambda: EngineConfig(attention_interval=-1), "attention_interval is -1"),
        (lambda: BackendConfig(threads=0), "threads is 0"),
        (lambda: ServerConfig(grpc_port=70000), "grpc_port is 70000; it must be from 0 to 65535"),
    ],
)
def test_settings_out_of_range(config, message):
    with pytest.raises(InputError, match=message):
        config()
