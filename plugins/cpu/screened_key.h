// The screen of one key, written when the key is stored; plugins/op/key_screen.py has the definition.
#pragma once

#include "screen.h"
#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

constexpr int kHalf = kLanes / 2, kKeyChannels = 16;  // channels that are converted together
using Half = float __attribute__((vector_size(kHalf * 4)));
using HalfInt = int32_t __attribute__((vector_size(kHalf * 4)));
using HalfBytes = int8_t __attribute__((vector_size(kHalf)));
using Doubles = double __attribute__((vector_size(kHalf * 8)));
using UnalignedHalf __attribute__((aligned(4), may_alias)) = Half;

// Calls `body(first, key, shift)` for each group of 16 channels, from channel `first` on, with addresses of the key's
// and the shift's channels; the last group is filled up with zeros. A null `shift` is zeros.
template <typename Body>
[[gnu::always_inline]] inline void for_channels(const float* key, const float* shift, int64_t channels, Body body) {
  alignas(64) float keys[kKeyChannels] = {}, shifts[kKeyChannels] = {};
  int64_t first = 0;
  for (; first + kKeyChannels <= channels; first += kKeyChannels)
    body(first, key + first, shift == nullptr ? shifts : shift + first);
  if (first == channels) return;
  __builtin_memcpy(keys, key + first, (channels - first) * sizeof(float));
  if (shift != nullptr) __builtin_memcpy(shifts, shift + first, (channels - first) * sizeof(float));
  body(first, keys, shifts);
}

inline Doubles widened(Half value) { return __builtin_convertvector(value, Doubles); }
inline double sum_of(Doubles value) {
  double sum = 0;
  for (int lane = 0; lane < kHalf; ++lane) sum += value[lane];
  return sum;
}

// Writes the screen of one key [head_dim], as the cache holds it, at `offset` of a block of `head`. The distance is
// summed in float64 and rounded up by more than head_dim 2^-53 of it, the rounding error for any order of its terms.
inline void screen_key(const Problem& problem, int64_t head, int64_t block, int64_t offset, const float* key) {
  constexpr float kLeast = 0x1p-126f;
  constexpr float kSmall = 0x1p-100f;      // the inverse of a smaller scale might be infinite
  constexpr double kUpward = 1 + 0x1p-20;  // more than the rounding error of a norm
  constexpr float kRounder = 12582912.0f;  // as in quantize.h
  const ScreenBlock to = screen_block(problem, block);
  const int64_t channels = problem.head_dim, stride = problem.block_size * 4;
  const float* shift = problem.key_shift == nullptr ? nullptr : problem.key_shift + head * channels;
  Doubles square{};
  Half largest{};
  for_channels(key, shift, channels, [&](int64_t, const float* keys, const float* shifts) {
    for (int index = 0; index < kKeyChannels; index += kHalf) {
      const Half numbers = *reinterpret_cast<const UnalignedHalf*>(keys + index);
      const Half moved = numbers - *reinterpret_cast<const UnalignedHalf*>(shifts + index);
      const Half length = reinterpret_cast<Half>(reinterpret_cast<HalfInt>(moved) & 0x7fffffff);
      square += widened(numbers) * widened(numbers);
      largest = length > largest ? length : largest;  // a NaN shows in the square
    }
  });
  float most = 0;
  for (int lane = 0; lane < kHalf; ++lane) most = larger(most, largest[lane]);
  const bool known = sum_of(square) < kLongest * kLongest;
  const float scale = known && most >= kSmall ? most / 127.0f : 0.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
  Doubles rest_square{};
  for_channels(key, shift, channels, [&](int64_t first, const float* keys, const float* shifts) {
    alignas(16) int8_t integers[kKeyChannels] = {};
    for (int index = 0; index < kKeyChannels && known; index += kHalf) {
      const Half numbers = *reinterpret_cast<const UnalignedHalf*>(keys + index);
      const Half shifted = *reinterpret_cast<const UnalignedHalf*>(shifts + index);
      Half scaled = (numbers - shifted) * inverse;
      scaled = scaled > 127.0f ? Half{} + 127.0f : scaled;
      scaled = scaled < -127.0f ? Half{} - 127.0f : scaled;
      const Half whole = scaled + kRounder - kRounder;
      const HalfBytes bytes = __builtin_convertvector(__builtin_convertvector(whole, HalfInt), HalfBytes);
      __builtin_memcpy(integers + index, &bytes, sizeof bytes);
      const Doubles rest =
          widened(numbers) - widened(shifted) - (Doubles{} + static_cast<double>(scale)) * widened(whole);
      rest_square += rest * rest;
    }
    const int64_t quads = smaller<int64_t>(screen_quads(problem) - first / 4, kKeyChannels / 4);
    for (int64_t quad = 0; quad < quads; ++quad)
      __builtin_memcpy(to.integers + (first / 4 + quad) * stride + offset * 4, integers + quad * 4, 4);
  });
  to.scale[offset] = scale;
  // The distance is never 0, because 0 means that nothing is known.
  to.distance[offset] = known ? static_cast<float>(__builtin_sqrt(sum_of(rest_square)) * kUpward) + kLeast : kInfinity;
}

}  // namespace sharp::cpu::SHARP_ISA
