// Quantization of numbers to 8-bit integers.
#pragma once

#include <cstdint>

namespace sharp::cpu {

// Returns value / scale rounded to even, with `inverse` = 1 / scale; 0 for NaN, because the scale is NaN then. Loops
// over it are vectorized, which they would not be with nearbyint.
inline int8_t quantize(float value, float inverse) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer
  const float scaled = value * inverse, upper = scaled > 127.0f ? 127.0f : scaled;
  const float bounded = upper < -127.0f ? -127.0f : upper;
  return static_cast<int8_t>(static_cast<int32_t>((bounded == bounded ? bounded : 0.0f) + kRounder - kRounder));
}

}  // namespace sharp::cpu
