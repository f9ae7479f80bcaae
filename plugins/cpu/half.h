// The 16-bit and 8-bit floating-point types in memory, and conversions of single numbers.
#pragma once

#include <cstdint>
#include <cstring>

namespace sharp::cpu {

struct Float16 {
  uint16_t bits;  // IEEE 754 binary16
};
struct Bfloat16 {
  uint16_t bits;  // the upper half of a float
};
struct Float8 {
  uint8_t bits;  // e4m3: 4 bits of exponent with bias 7 and 3 of mantissa; 0x7f and 0xff are NaN, no infinity
};

namespace detail {

[[gnu::always_inline]] inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
[[gnu::always_inline]] inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace detail

[[gnu::always_inline]] inline float to_float(float value) { return value; }
[[gnu::always_inline]] inline float to_float(int8_t value) { return value; }
[[gnu::always_inline]] inline float to_float(Bfloat16 value) {
  return detail::float_of_bits(static_cast<uint32_t>(value.bits) << 16);
}
[[gnu::always_inline]] inline float to_float(Float16 value) {
  const uint32_t magnitude = value.bits & 0x7fff, sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t finite = detail::bits_of_float(detail::float_of_bits(magnitude << 13) * 0x1p112f);
  return detail::float_of_bits((magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000 : finite) | sign);
}
[[gnu::always_inline]] inline float to_float(Float8 value) {
  const uint32_t magnitude = value.bits & 0x7f, sign = static_cast<uint32_t>(value.bits & 0x80) << 24;
  const uint32_t normal = (magnitude << 20) + 0x3c000000;  // float's exponent bias is larger by 120
  const uint32_t finite =
      magnitude < 8 ? detail::bits_of_float(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f) : normal;
  return detail::float_of_bits((magnitude == 0x7f ? 0x7fc00000 : finite) | sign);
}

// Rounds to nearest, ties to even. NaN stays NaN, and numbers that are too large become infinity.
[[gnu::always_inline]] inline Bfloat16 to_bfloat16(float value) {
  const uint32_t bits = detail::bits_of_float(value);
  if (value != value) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
[[gnu::always_inline]] inline Float16 to_float16(float value) {
  const uint32_t bits = detail::bits_of_float(value), magnitude = bits & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 rounds to 65536
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds to multiples of 2^-24, the sum's last bit
    const float rounded = detail::float_of_bits(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (detail::bits_of_float(rounded) - 0x3f000000))};
  }
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13))};
}

// Rounds to nearest, ties to even. NaN becomes 0, and numbers that are too large +-448. The compiler vectorizes it.
[[gnu::always_inline]] inline Float8 to_float8(float value) {
  constexpr uint32_t kLargest = 0x43e00000, kLeastNormal = 0x3c800000;  // 448 and 2^-6
  const uint32_t bits = detail::bits_of_float(value), magnitude = bits & 0x7fffffff;
  const uint32_t bounded = magnitude < kLargest ? magnitude : kLargest;
  const uint32_t normal = (bounded - 0x3c000000 + 0x7ffff + (bounded >> 20 & 1)) >> 20;
  // Adding 2^14 rounds to multiples of 2^-9, the worth of the sum's last bit.
  const uint32_t subnormal = detail::bits_of_float(detail::float_of_bits(bounded) + 0x1p14f) - 0x46800000;
  const uint32_t code = (bounded < kLeastNormal ? subnormal : normal) | (bits >> 24 & 0x80);
  return {static_cast<uint8_t>(magnitude > 0x7f800000 ? 0 : code)};
}

}  // namespace sharp::cpu
