// The element types of a cache, each read as float vectors; `load(const float*)` is in vector.h.
#pragma once

#include "half.h"
#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

template <typename Element>
struct Lanes {
  using Type __attribute__((vector_size(kLanes * sizeof(Element)))) = Element;
  using Unaligned __attribute__((vector_size(kLanes * sizeof(Element)), aligned(1), may_alias)) = Element;
};

template <typename Element>
typename Lanes<Element>::Type load_lanes(const void* from) {
  return *reinterpret_cast<const typename Lanes<Element>::Unaligned*>(from);
}

// GCC 12 makes a detour through memory of the wider __builtin_convertvector.
inline Vec load(const Bfloat16* from) {
  const auto bits = load_lanes<uint16_t>(from);
#if defined(__AVX512F__)
  return from_bits(reinterpret_cast<VecInt>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(bits))) << 16);
#elif defined(__AVX2__)
  return from_bits(reinterpret_cast<VecInt>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(bits))) << 16);
#else
  return from_bits(__builtin_convertvector(bits, VecInt) << 16);
#endif
}

inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i integers = reinterpret_cast<__m128i>(load_lanes<int8_t>(from));
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(integers)));
#elif defined(__AVX2__)
  const __m128i integers = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vec>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(integers)));
#else
  return __builtin_convertvector(load_lanes<int8_t>(from), Vec);
#endif
}

inline Vec load(const Float16* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(load_lanes<uint16_t>(from))));
#elif defined(__F16C__)
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(load_lanes<uint16_t>(from))));
#else
  // The exponent of 2^x moves by 127 - 15 = 112; infinity and NaN have all exponent bits set in both.
  const VecInt bits = __builtin_convertvector(load_lanes<uint16_t>(from), VecInt), magnitude = bits & 0x7fff;
  const VecInt finite = bits_of(from_bits(magnitude << 13) * 0x1p112f);
  const VecInt value = magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000 : finite;
  return from_bits(value | (bits & 0x8000) << 16);
#endif
}

}  // namespace sharp::cpu::SHARP_ISA
