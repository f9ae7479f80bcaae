// Numbers as integers of 8 bits.
#pragma once

#include <cstdint>

namespace sharp::cpu {

// value / scale rounded to even, `inverse` being 1 / scale; 0 for a NaN, of which the scale tells. Loops over it become
// vector instructions; with nearbyint they would not.
inline int8_t quantize(float value, float inverse) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer
  const float scaled = value * inverse, upper = scaled > 127.0f ? 127.0f : scaled;
  const float bounded = upper < -127.0f ? -127.0f : upper;
  return static_cast<int8_t>(static_cast<int32_t>((bounded == bounded ? bounded : 0.0f) + kRounder - kRounder));
}

}  // namespace sharp::cpu
