"""Numbers of 8 bits, e4m3, are encoded and decoded as torch does."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharp.plugins.op import e4m3

BYTES = np.arange(256, dtype=np.uint8)
NUMBERS = torch.from_numpy(BYTES).view(torch.float8_e4m3fn).float().numpy()


def by_torch(numbers: np.ndarray) -> np.ndarray:
    """Return torch's encoding of `numbers`, cut off at 448 first, because torch makes NaN of larger numbers."""
    bounded = torch.from_numpy(np.clip(numbers, -448, 448))
    encoded: np.ndarray = bounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return encoded


def test_every_byte_is_the_number_that_torch_reads() -> None:
    np.testing.assert_array_equal(e4m3.decode(BYTES), NUMBERS)
    assert np.signbit(e4m3.decode(np.uint8([0x80])))[0]


def test_every_number_comes_back() -> None:
    back = e4m3.encode(NUMBERS)
    nan = np.isnan(NUMBERS)
    np.testing.assert_array_equal(back[~nan], BYTES[~nan])
    assert nan.sum() == 2
    assert not back[nan].any()


def test_numbers_between_two_are_rounded_as_torch_rounds_them() -> None:
    exact = np.sort(NUMBERS[np.isfinite(NUMBERS)])
    halfway = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    either = [np.nextafter(halfway, np.float32(side)) for side in (-np.inf, np.inf)]
    numbers = np.concatenate([halfway, *either, np.float32([448.5, 464, 470, -464, 1e38, np.inf, -np.inf, 1e-45])])
    np.testing.assert_array_equal(e4m3.encode(numbers), by_torch(numbers))


def test_any_float32_is_rounded_as_torch_rounds_it() -> None:
    numbers = np.random.default_rng(0).integers(0, 2**32, 1_000_000, np.uint32).view(np.float32)
    encoded = e4m3.encode(numbers)
    nan = np.isnan(numbers)
    np.testing.assert_array_equal(encoded[~nan], by_torch(numbers[~nan]))
    assert not encoded[nan].any()


@given(largest=st.floats(0, allow_infinity=False, allow_nan=False, width=32))
def test_a_scale_is_a_power_of_two_that_lets_a_number_fit(largest: float) -> None:
    scale = float(e4m3.scale_of(np.float32(largest)))
    if largest == 0:
        assert scale == 0
        return
    assert np.frexp(scale)[0] == 0.5
    assert largest / scale < 256
    assert largest / scale >= 128 or scale == 2.0**-126


@pytest.mark.parametrize("largest", [np.nan, np.inf])
def test_there_is_no_scale_of_what_is_not_finite(largest: float) -> None:
    assert np.isnan(e4m3.scale_of(np.float32(largest)))
