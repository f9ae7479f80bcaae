"""The kernel that samples, interpreted, against the CPU's sampler and against the definition in float64."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharp.plugins.cpu.sampling import CHANGE, NO_TOKEN, Changes, sample
from sharp.plugins.cuda import sampler
from sharp.plugins.cuda.kernel_set import sampling_kernel
from sharp.plugins.triton import variants
from tests.full.triton import interpreted
from tests.full.triton.test_variants import assembled
from tests.plugins.test_sampling import LIMITS, check_draw

NEAR = 2e-6  # a random number this close to the border of two tokens may choose either
SMALL = (256, 64)  # sizes of tiles and of lists of candidates, so small that short rows have several of both
SHIPPED = (8192, 4096)


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    spread = {"flat": 0.3, "normal": 3, "steep": 30, "ties": 2, "masked": 3, "equal": 0}[kind]
    logits = random.normal(0, spread, (rows, vocab)).astype(np.float32)
    if kind == "ties":
        logits = np.rint(logits)
    if kind == "masked":
        logits[random.random(logits.shape) < 0.95] = -np.inf
    return logits


@pytest.fixture
def sampled(interpreter: ProcessPoolExecutor) -> Any:
    """Return `sampled(logits, samplings, indices, sizes)`, which returns the kernel's tokens."""

    def run(
        logits: np.ndarray, samplings: Any, indices: np.ndarray | None = None, sizes: tuple[int, int] = SMALL
    ) -> np.ndarray:
        future = interpreter.submit(interpreted.sample, logits, np.array(samplings, float), indices, sizes)
        tokens: np.ndarray = future.result()[0]
        return tokens

    return run


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    limits=st.lists(LIMITS, min_size=1, max_size=4),
    vocab=st.sampled_from([1, 3, 127, 257, 1000, 5000]),
    kind=st.sampled_from(["flat", "normal", "steep", "ties", "masked", "equal"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_draws_follow_the_definition(
    sampled: Any, limits: list[tuple[float, ...]], vocab: int, kind: str, seed: int
) -> None:
    logits = logits_of(kind, len(limits), vocab, seed)
    for row, token, limit in zip(logits, sampled(logits, limits).tolist(), limits, strict=True):
        check_draw(row, token, *limit)


@pytest.mark.parametrize("vocab", [1, 257, 49_152])
@pytest.mark.parametrize("kind", ["flat", "normal", "steep", "ties", "masked"])
def test_tokens_are_the_cpus(sampled: Any, kind: str, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    filters = [
        *[(0, 1, 0), (1, 1, 0), (vocab, 1, 0), (40, 1, 0), (vocab // 2 + 1, 1, 0), (0, 1e-6, 0), (0, 0.9, 0)],
        *[(0, 1, 0.05), (50, 0.95, 0.01), (vocab // 2, 0.5, 0), (0, 0.999999, 0)],
    ]
    sharpness = [1.0, 0.01, 1e4]
    rows = [(sharpness[i % 3], *each, random.random()) for i, each in enumerate(filters)] + [(0, 0, 1, 0, 0.5)]
    rows += [(1, *each, random.random()) for each in filters]
    logits = logits_of(kind, len(rows), vocab, seed=vocab)
    parameters = np.array(rows)
    found, expected = sampled(logits, parameters, sizes=SHIPPED), sample(logits, parameters)
    # rows may differ only where a random number close by chooses the kernel's token
    for row in np.flatnonzero(found != expected):
        beside = parameters[[row, row]]
        beside[:, 4] += [-NEAR, NEAR]
        assert found[row] in sample(logits[[row, row]], np.clip(beside, 0, 1 - 1e-16)), rows[row]
    assert (found != expected).sum() <= 1


def test_tokens_that_tie_with_the_last_that_is_kept_are_kept(sampled: Any) -> None:
    logits = np.array([1, 2, 2, 0, 2, 3], np.float32)
    randoms = np.linspace(0, 1, 40, endpoint=False)

    def kept(top_k: int, top_p: float) -> set[int]:
        rows = [(1, top_k, top_p, 0, random) for random in randoms]
        return set(sampled(np.tile(logits, (len(rows), 1)), rows).tolist())

    assert kept(2, 1) == kept(4, 1) == {1, 2, 4, 5}
    assert kept(0, 0.6) == {1, 2, 4, 5}
    assert kept(1, 1) == kept(0, 0.4) == {5}


def test_the_first_of_equal_maxima_is_taken(sampled: Any) -> None:
    logits = np.zeros((3, 1000), np.float32)
    logits[0, [700, 300, 301]] = 5
    logits[1, [999]] = 5
    assert sampled(logits, [(0, 0, 1, 0, 0.9)] * 3).tolist() == [300, 999, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sharpness", [0, 1])
def test_rows_that_are_not_finite_have_no_token(sampled: Any, bad: float, sharpness: float) -> None:
    logits = np.zeros((4, 300), np.float32)
    logits[3, 270] = 100
    for row, place in enumerate([0, 130, 299]):
        logits[row, place] = bad
        if bad == -np.inf:
            logits[row] = bad
    tokens = sampled(logits, [(sharpness, 5, 0.9, 0, 0.5)] * 4)
    assert tokens.tolist() == [NO_TOKEN] * 3 + [270]


def test_rows_may_be_any_of_the_logits(sampled: Any) -> None:
    logits = logits_of("normal", 5, 300, seed=1)
    limits = [(1, 0, 1, 0, 0.3), (2, 7, 0.8, 0, 0.6), (0, 0, 1, 0, 0)]
    indices = np.array([4, 1, 4])
    assert sampled(logits, limits, indices).tolist() == sample(logits[indices], np.array(limits)).tolist()


def test_frequencies_are_the_probabilities(sampled: Any) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    randoms = (np.arange(200) + 0.5) / 200
    tokens = sampled(np.tile(logits, (200, 1)), [(1, 0, 1, 0, random) for random in randoms])
    assert np.bincount(tokens).tolist() == [20, 80, 40, 60]


@pytest.mark.parametrize("filters", [(0, 1), (7, 1), (0, 0.9), (7, 0.9)])
def test_a_row_without_filters_is_read_four_times(interpreter: ProcessPoolExecutor, filters: tuple[int, float]) -> None:
    logits, sizes = logits_of("normal", 1, 5000, seed=4), SHIPPED
    greedy, reads = (
        interpreter.submit(
            interpreted.sampling_reads, logits, np.array([(sharpness, *filters, 0, 0.5)]), sizes
        ).result()
        for sharpness in (0, 1)
    )
    assert greedy == 1
    assert reads == 4 if filters == (0, 1) else 4 < reads < 15  # the maximum, the sum, the tile, and the token


def changes_of(random: np.random.Generator, rows: int, vocab: int, most: int) -> Changes:
    """Return random changes for each row: biases and masks, then penalties, partly for the same tokens."""

    def part(count: int) -> np.ndarray:
        entries = np.empty(count, CHANGE)
        entries["token"] = random.permutation(vocab)[:count]
        entries["bias"] = np.where(random.random(count) < 0.2, -np.inf, random.normal(0, 3, count))
        entries["repetition"] = random.choice([1, 1.3, 0.7, 1e30, 1e-30], count)
        entries["amount"] = random.normal(0, 1, count)
        return entries

    return Changes.of([part(min(vocab, int(random.integers(0, most)))) for _ in range(2 * rows)])


@pytest.mark.parametrize("kind", ["normal", "masked", "ties"])
@pytest.mark.parametrize("vocab", [3, 1000, 5000])
def test_logits_are_changed_as_on_the_cpu_bit_for_bit(interpreter: ProcessPoolExecutor, kind: str, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    logits = logits_of(kind, 7, vocab, seed=vocab)
    indices = np.array([5, 0, 6, 2])
    changes = changes_of(random, len(indices), vocab, 1700)
    limits = np.array([(0, 0, 1, 0, 0), (1, 0, 1, 0, 0.4), (0.7, 20, 0.9, 0, 0.6), (1, 0, 1, 0.02, 0.99)])
    tokens, changed = interpreter.submit(interpreted.sample, logits, limits, indices, SMALL, changes).result()
    expected = logits[indices]
    changes.apply(expected)
    assert not np.array_equal(expected, logits[indices])
    untouched = [1, 3, 4]
    np.testing.assert_array_equal(changed[untouched].view(np.int32), logits[untouched].view(np.int32))
    np.testing.assert_array_equal(changed[indices].view(np.int32), expected.view(np.int32))
    np.testing.assert_array_equal(tokens, sample(expected, limits))


def test_a_mask_holds_against_every_logit_and_tokens_outside_the_vocabulary_change_nothing(
    interpreter: ProcessPoolExecutor,
) -> None:
    logits = np.array([[np.nan, np.inf, 1, 2]], np.float32)
    masks = np.array([(0, -np.inf, 1, 0), (1, -np.inf, 1, 0), (4, 9, 1, 0), (-1, 9, 1, 0)], CHANGE)
    changes = Changes.of([masks, np.empty(0, CHANGE)])
    call = interpreter.submit(interpreted.sample, logits, np.array([(0.0, 0, 1, 0, 0)]), None, SMALL, changes)
    tokens, changed = call.result()
    assert tokens.tolist() == [3]
    assert changed.tolist() == [[-np.inf, -np.inf, 1, 2]]


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_the_kernel_keeps_its_registers(capability: int, tmp_path: Path) -> None:
    own = sampling_kernel()
    signature = {**own.arguments, **dict.fromkeys(own.constants, "constexpr")}
    kernel = variants.Kernel(own.function, signature, dict(own.constants), own.warps, own.stages)
    said = assembled(variants.compile_kernel(kernel, capability), capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in said


def test_scratch_memory_is_what_the_kernel_was_compiled_for() -> None:
    header = (Path(sampler.__file__).parent / "sharp_cuda.h").read_text()
    candidates = sampling_kernel().constants["CANDIDATES"]
    assert candidates == sampler.CANDIDATES
    assert f"SHARP_SAMPLING_CANDIDATES = {candidates} }}" in header
    assert sampling_kernel().name == sampler.KERNEL
