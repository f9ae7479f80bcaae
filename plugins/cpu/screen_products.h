// Exact products of integer queries with the integers of a key screen, for 16 keys at a time.
#pragma once

#include "screen.h"
#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

// `arrange_integers` reorders the integers of a query, [4 * quads] of 16 bits, in place, for `screen_products` of this
// instruction set. Behind the integers is room for four more.

#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)

constexpr int kLargestInteger = 16256;  // 128 * 127, the maximum for two signed bytes

// An integer is 128 * high + low; each quad has 4 high and 4 low bytes. VNNI multiplies signed by unsigned bytes only,
// so 128 is added to the bytes of the keys, and the resulting offset of a row's products is stored behind the quads.
inline void arrange_integers(int16_t* query, int64_t quads) {
  int32_t sum = 0;
  for (int64_t quad = 0; quad < quads; ++quad) {
    int8_t bytes[8];
    for (int channel = 0; channel < 4; ++channel) {
      const int16_t integer = query[quad * 4 + channel];
      const auto high = static_cast<int8_t>((integer + 64) >> 7);
      bytes[channel] = high;
      bytes[4 + channel] = static_cast<int8_t>(integer - 128 * high);
      sum += integer;
    }
    __builtin_memcpy(query + quad * 4, bytes, sizeof bytes);
  }
  const int32_t correction = -128 * sum;
  __builtin_memcpy(query + quads * 4, &correction, sizeof correction);
}

#if defined(__AVX512VNNI__)

constexpr int kScreenRows = 6;  // rows that share each load

inline __m512i broadcast_four(const int8_t* bytes) {
  int32_t four;
  __builtin_memcpy(&four, bytes, sizeof four);
  return _mm512_set1_epi32(four);
}

// Computes products [kRows, 16]. `integers` has quads of channels `stride` bytes apart, 4 bytes per key; rows of
// `query` are `query_stride` apart. `ahead` has the layout of `integers` and is prefetched line by line.
template <int kRows>
void screen_products(const int8_t* integers, const int8_t* ahead, int64_t stride, int64_t quads, const int16_t* query,
                     int64_t query_stride, float* products) {
  __m512i high[kRows], low[kRows];
  const int8_t* rows[kRows];
  for (int row = 0; row < kRows; ++row) {
    rows[row] = reinterpret_cast<const int8_t*>(query + row * query_stride);
    high[row] = _mm512_setzero_si512();
    low[row] = broadcast_four(rows[row] + 8 * quads);
  }
  const __m512i sign = _mm512_set1_epi8(INT8_MIN);
  for (int64_t quad = 0; quad < quads; ++quad) {
    __builtin_prefetch(ahead + quad * stride);
    const __m512i keys = _mm512_xor_si512(sign, _mm512_loadu_si512(integers + quad * stride));
    for (int row = 0; row < kRows; ++row) {
      high[row] = _mm512_dpbusd_epi32(high[row], keys, broadcast_four(rows[row] + quad * 8));
      low[row] = _mm512_dpbusd_epi32(low[row], keys, broadcast_four(rows[row] + quad * 8 + 4));
    }
  }
  // The sum fits 32 bits even if its terms overflow.
  for (int row = 0; row < kRows; ++row) {
    const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(high[row], 7), low[row]);
    _mm512_storeu_ps(products + row * kStripKeys, _mm512_cvtepi32_ps(sums));
  }
}

#else

constexpr int kScreenRows = 3;  // 24 registers of sums

template <int kRows>
void screen_products(const int8_t* integers, const int8_t* ahead, int64_t stride, int64_t quads, const int16_t* query,
                     int64_t query_stride, float* products) {
  constexpr int kVectors = kStripKeys / 4;
  int32x4_t high[kRows][kVectors], low[kRows][kVectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) high[row][v] = low[row][v] = vdupq_n_s32(0);
  for (int64_t quad = 0; quad < quads; ++quad) {
    __builtin_prefetch(ahead + quad * stride);
    int8x8_t bytes[kRows];
    for (int row = 0; row < kRows; ++row)
      bytes[row] = vld1_s8(reinterpret_cast<const int8_t*>(query + row * query_stride + quad * 4));
    for (int v = 0; v < kVectors; ++v) {
      const int8x16_t keys = vld1q_s8(integers + quad * stride + v * 16);
      for (int row = 0; row < kRows; ++row) {
        high[row][v] = vdotq_lane_s32(high[row][v], keys, bytes[row], 0);
        low[row][v] = vdotq_lane_s32(low[row][v], keys, bytes[row], 1);
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v)
      vst1q_f32(products + row * kStripKeys + v * 4,
                vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high[row][v], 7), low[row][v])));
}

#endif
#else

constexpr int kLargestInteger = INT16_MAX;

inline void arrange_integers(int16_t*, int64_t) {}

#if defined(__AVX512BW__)

constexpr int kScreenRows = 6;

// Adds each pair of neighbours, giving 8 lanes.
inline __m256i sum_pairs(__m512i sums) {
  return _mm512_cvtepi64_epi32(_mm512_add_epi32(sums, _mm512_srli_epi64(sums, 32)));
}

template <int kRows>
void screen_products(const int8_t* integers, const int8_t* ahead, int64_t stride, int64_t quads, const int16_t* query,
                     int64_t query_stride, float* products) {
  __m512i sums[kRows][2];
  for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = _mm512_setzero_si512();
  for (int64_t quad = 0; quad < quads; ++quad) {
    const __m256i* from = reinterpret_cast<const __m256i*>(integers + quad * stride);
    __builtin_prefetch(ahead + quad * stride);
    const __m512i low = _mm512_cvtepi8_epi16(_mm256_loadu_si256(from));
    const __m512i high = _mm512_cvtepi8_epi16(_mm256_loadu_si256(from + 1));
    for (int row = 0; row < kRows; ++row) {
      int64_t four;
      __builtin_memcpy(&four, query + row * query_stride + quad * 4, sizeof four);
      const __m512i q = _mm512_set1_epi64(four);
      sums[row][0] = _mm512_add_epi32(sums[row][0], _mm512_madd_epi16(low, q));
      sums[row][1] = _mm512_add_epi32(sums[row][1], _mm512_madd_epi16(high, q));
    }
  }
  for (int row = 0; row < kRows; ++row) {
    const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(sum_pairs(sums[row][0])), sum_pairs(sums[row][1]), 1);
    _mm512_storeu_ps(products + row * kStripKeys, _mm512_cvtepi32_ps(all));
  }
}

#elif defined(__AVX2__)

constexpr int kScreenRows = 3;

// Computes products for 8 keys at a time, because the sums of 16 would not stay in registers.
template <int kRows>
void screen_products(const int8_t* integers, const int8_t* ahead, int64_t stride, int64_t quads, const int16_t* query,
                     int64_t query_stride, float* products) {
  for (int half = 0; half < 2; ++half) {
    __m256i sums[kRows][2];
    for (int row = 0; row < kRows; ++row)
      for (int four = 0; four < 2; ++four) sums[row][four] = _mm256_setzero_si256();
    const int8_t* from = integers + half * 32;
#pragma GCC unroll 2
    for (int64_t quad = 0; quad < quads; ++quad, from += stride) {
      if (half == 0) __builtin_prefetch(ahead + quad * stride);
      const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + 1));
      for (int row = 0; row < kRows; ++row) {
        int64_t channels;
        __builtin_memcpy(&channels, query + row * query_stride + quad * 4, sizeof channels);
        const __m256i q = _mm256_set1_epi64x(channels);
        sums[row][0] = _mm256_add_epi32(sums[row][0], _mm256_madd_epi16(low, q));
        sums[row][1] = _mm256_add_epi32(sums[row][1], _mm256_madd_epi16(high, q));
      }
    }
    for (int row = 0; row < kRows; ++row) {
      // hadd interleaves the halves of both registers: keys 0, 1, 4, 5, 2, 3, 6, 7.
      const __m256i pairs = _mm256_hadd_epi32(sums[row][0], sums[row][1]);
      const __m256i in_order = _mm256_permute4x64_epi64(pairs, 0b11011000);
      _mm256_storeu_ps(products + row * kStripKeys + half * 8, _mm256_cvtepi32_ps(in_order));
    }
  }
}

#else

constexpr int kScreenRows = 3;

template <int kRows>
void screen_products(const int8_t* integers, const int8_t* ahead, int64_t stride, int64_t quads, const int16_t* query,
                     int64_t query_stride, float* products) {
  for (int64_t quad = 0; quad < quads; ++quad) __builtin_prefetch(ahead + quad * stride);
  for (int row = 0; row < kRows; ++row) {
    int32_t sums[kStripKeys] = {};
    for (int64_t quad = 0; quad < quads; ++quad) {
      const int8_t* keys = integers + quad * stride;
      const int16_t* q = query + row * query_stride + quad * 4;
      for (int key = 0; key < kStripKeys; ++key)
        sums[key] +=
            keys[4 * key] * q[0] + keys[4 * key + 1] * q[1] + keys[4 * key + 2] * q[2] + keys[4 * key + 3] * q[3];
    }
    for (int key = 0; key < kStripKeys; ++key) products[row * kStripKeys + key] = static_cast<float>(sums[key]);
  }
}

#endif
#endif

using ScreenProducts = void (*)(const int8_t*, const int8_t*, int64_t, int64_t, const int16_t*, int64_t, float*);

#if defined(__AVX512BW__)
inline constexpr ScreenProducts kScreenProducts[kScreenRows] = {screen_products<1>, screen_products<2>,
                                                                screen_products<3>, screen_products<4>,
                                                                screen_products<5>, screen_products<6>};
#else
inline constexpr ScreenProducts kScreenProducts[kScreenRows] = {screen_products<1>, screen_products<2>,
                                                                screen_products<3>};
#endif

}  // namespace sharp::cpu::SHARP_ISA
