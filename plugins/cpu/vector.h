// The vector of the instruction set that this file is compiled for, on the compiler's vector extension.
//
// Every file that includes this header is compiled once per instruction set, inside `namespace SHARP_ISA`. Such files
// must not call inline functions of the standard library, because the linker keeps only one copy of a function, which
// may be the one with AVX-512.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace sharp::cpu::SHARP_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

using Vec = float __attribute__((vector_size(kLanes * 4)));
using VecInt = int32_t __attribute__((vector_size(kLanes * 4)));
// The attributes stand before `=`, because behind it clang would keep the alignment of a vector.
using UnalignedVec __attribute__((aligned(4), may_alias)) = Vec;

constexpr float kInfinity = __builtin_inff();

inline Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<UnalignedVec*>(to) = value; }
inline Vec splat(float value) { return value - Vec{}; }
inline VecInt bits_of(Vec value) { return reinterpret_cast<VecInt>(value); }
inline Vec from_bits(VecInt value) { return reinterpret_cast<Vec>(value); }
inline Vec select(VecInt mask, Vec yes, Vec no) { return mask ? yes : no; }
inline Vec absolute(Vec value) { return from_bits(bits_of(value) & 0x7fffffff); }

// maximum and minimum keep a NaN in `b` and drop a NaN in `a`. with_sign_of needs a `magnitude` without a sign.
#if defined(__AVX512F__)  // one instruction each, which the compiler does not find by itself
inline Vec maximum(Vec a, Vec b) {
  return reinterpret_cast<Vec>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
inline Vec minimum(Vec a, Vec b) {
  return reinterpret_cast<Vec>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
inline Vec with_sign_of(Vec magnitude, Vec sign) {
  constexpr int kOrAnd = 0xf8;  // magnitude | (sign & mask)
  return reinterpret_cast<Vec>(_mm512_ternarylogic_epi32(
      reinterpret_cast<__m512i>(magnitude), reinterpret_cast<__m512i>(sign), _mm512_set1_epi32(INT32_MIN), kOrAnd));
}
#else
inline Vec maximum(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec minimum(Vec a, Vec b) { return select(a < b, a, b); }
inline Vec with_sign_of(Vec magnitude, Vec sign) { return from_bits(bits_of(magnitude) | (bits_of(sign) & INT32_MIN)); }
#endif

template <typename T>
T smaller(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T larger(T a, T b) {
  return a > b ? a : b;
}

// Returns 0, 1, ... kLanes - 1.
inline Vec lane_numbers() {
  Vec numbers{};
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = static_cast<float>(lane);
  return numbers;
}

// Returns a mask of the lanes whose bit is set in the low kLanes bits.
inline VecInt lanes_of(uint64_t bits) {
  VecInt lane_bits{};
  for (int lane = 0; lane < kLanes; ++lane) lane_bits[lane] = 1 << lane;
  const VecInt all = static_cast<int32_t>(bits & 0xffff) - VecInt{};
  return (all & lane_bits) != 0;
}

// Returns the bits of a comparison's result; bit i is lane i.
inline uint64_t mask_of(VecInt comparison) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(comparison));
#elif defined(__AVX2__)
  return static_cast<uint64_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(comparison)));
#else
  uint64_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint64_t>(comparison[lane] & 1) << lane;
  return bits;
#endif
}

inline bool any(VecInt comparison) { return mask_of(comparison) != 0; }

// Combines all lanes by halves, because a chain over 16 lanes would wait for 16 latencies.
template <typename Combine>
float reduce(Vec value, Combine combine) {
  using Quad = float __attribute__((vector_size(16)));
  Quad quad;
#if defined(__AVX512F__)
  using Half = float __attribute__((vector_size(32)));
  const Half half = combine(__builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7),
                            __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15));
  quad = combine(__builtin_shufflevector(half, half, 0, 1, 2, 3), __builtin_shufflevector(half, half, 4, 5, 6, 7));
#elif defined(__AVX2__)
  quad = combine(__builtin_shufflevector(value, value, 0, 1, 2, 3), __builtin_shufflevector(value, value, 4, 5, 6, 7));
#else
  quad = value;
#endif
  const Quad pair = combine(quad, __builtin_shufflevector(quad, quad, 2, 3, 0, 1));
  const Quad one = combine(pair, __builtin_shufflevector(pair, pair, 1, 0, 3, 2));
  return one[0];
}

inline float sum_of(Vec value) {
  return reduce(value, [](auto a, auto b) { return a + b; });
}
inline float maximum_of(Vec value) {
  return reduce(value, [](auto a, auto b) { return a > b ? a : b; });
}
inline float minimum_of(Vec value) {
  return reduce(value, [](auto a, auto b) { return a < b ? a : b; });
}

}  // namespace sharp::cpu::SHARP_ISA
