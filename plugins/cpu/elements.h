// Loads of the element types of a cache as float vectors; `load(const float*)` is in vector.h.
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

// Intrinsics are used, because GCC 12 takes a detour through memory for the wider __builtin_convertvector.
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

// e4m3's bits, shifted by 7, are the float16 number that is 2^-8 times as large. The conversion from float16 is as fast
// for subnormal numbers as for others, unlike a product of floats.
inline Vec load(const Float8* from) {
#if defined(__AVX512F__)
  const __m256i words = _mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(load_lanes<uint8_t>(from)));
  const __m256i magnitude = _mm256_set1_epi16(0x7f), infinite = _mm256_set1_epi16(0x7c00);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(words, magnitude), magnitude);
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_or_si256(halves, _mm256_and_si256(nan, infinite)))) * 0x1p8f;
#elif defined(__F16C__)
  const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m128i magnitude = _mm_set1_epi16(0x7f), infinite = _mm_set1_epi16(0x7c00);
  const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(words, magnitude), magnitude);
  const __m128i halves = _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_or_si128(halves, _mm_and_si128(nan, infinite)))) * 0x1p8f;
#else
  const VecInt bits = __builtin_convertvector(load_lanes<uint8_t>(from), VecInt), magnitude = bits & 0x7f;
  const VecInt subnormal = bits_of(__builtin_convertvector(magnitude, Vec) * 0x1p-9f);
  const VecInt finite = magnitude < 8 ? subnormal : (magnitude << 20) + 0x3c000000;
  const VecInt value = magnitude == 0x7f ? VecInt{} + 0x7fc00000 : finite;
  return from_bits(value | (bits & 0x80) << 24);
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
