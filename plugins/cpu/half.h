// The 16-bit floating-point types as they lie in memory, with their conversions one number at a time.
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

// Round to nearest, ties to even; NaN stays NaN, and what is too large becomes infinity.
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
  if (magnitude < 0x38800000) {  // below 2^-14: the sum's last bit is worth 2^-24, so the addition rounds
    const float rounded = detail::float_of_bits(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (detail::bits_of_float(rounded) - 0x3f000000))};
  }
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13))};
}

}  // namespace sharp::cpu
