// The loops of vocabulary.h for the instruction set that this file is compiled for.
#pragma once

#include "vector_math.h"
#include "vocabulary.h"

namespace sharp::cpu::SHARP_ISA {

// Returns a vector of the first `count` values, filled up with `fill`.
inline Vec load_first(const float* from, int64_t count, float fill) {
  if (count >= kLanes) return load(from);
  Vec value = splat(fill);
  for (int64_t lane = 0; lane < count; ++lane) value[lane] = from[lane];
  return value;
}

inline Peak peak(const float* values, int64_t count, float* maxima) {
  float highest = -kInfinity;
  int64_t first = 0;
  VecInt not_a_number{};
  for (int64_t block = 0; block < count; block += kVocabularyBlock) {
    Vec best = splat(-kInfinity);
    for (int64_t i = block; i < smaller(block + kVocabularyBlock, count); i += kLanes) {
      const Vec value = load_first(values + i, count - i, -kInfinity);
      not_a_number |= value != value;
      best = maximum(value, best);
    }
    const float best_of_block = maximum_of(best);
    maxima[block / kVocabularyBlock] = best_of_block;
    if (best_of_block > highest) {
      highest = best_of_block;
      first = block;
    }
  }
  if (mask_of(not_a_number) != 0) return {__builtin_nanf(""), 0};
  while (first < count - 1 && values[first] != highest) ++first;
  return {highest, first};
}

inline void weigh(const float* logits, int64_t count, float highest, float sharpness, float* weights,
                  const BlockTotals& totals) {
  for (int64_t block = 0; block * kVocabularyBlock < count; ++block) {
    Vec sum{}, best{};
    for (int64_t i = block * kVocabularyBlock; i < (block + 1) * kVocabularyBlock; i += kLanes) {
      const Vec weight = exp_nonpositive((load_first(logits + i, count - i, -kInfinity) - highest) * sharpness);
      store(weights + i, weight);
      sum += weight;
      best = maximum(weight, best);
    }
    totals.sums[block] = sum_of(sum);
    totals.maxima[block] = maximum_of(best);
  }
}

inline int64_t collect(const float* values, int64_t count, float bound, int32_t* places) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const VecInt kept = load_first(values + i, count - i, -kInfinity) >= splat(bound);
    for (uint64_t mask = mask_of(kept); mask != 0; mask &= mask - 1) {
      const int64_t place = i + __builtin_ctzll(mask);
      if (place < count) places[found++] = static_cast<int32_t>(place);
    }
  }
  return found;
}

inline int64_t compress(const float* weights, int64_t count, float low, float high, float* kept) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec weight = load(weights + i);
    uint64_t mask = mask_of((weight >= splat(low)) & (weight < splat(high)));
#if defined(__AVX512F__)
    const __m512 front = _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), reinterpret_cast<__m512>(weight));
    store(kept + found, reinterpret_cast<Vec>(front));
    found += __builtin_popcountll(mask);
#else
    for (; mask != 0; mask &= mask - 1) kept[found++] = weight[__builtin_ctzll(mask)];
#endif
  }
  return found;
}

inline Tail tail(const float* weights, int64_t count, float bound) {
  VecInt above{};
  Vec lowest = splat(kInfinity);
  double mass = 0;
  for (int64_t block = 0; block < count; block += kVocabularyBlock) {
    Vec sum{};
    for (int64_t i = block; i < block + kVocabularyBlock; i += kLanes) {
      const Vec weight = load(weights + i);
      const VecInt kept = weight >= splat(bound);
      above -= kept;
      lowest = minimum(lowest, select(kept, weight, splat(kInfinity)));
      sum += select(kept, weight, Vec{});
    }
    mass += sum_of(sum);
  }
  int64_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += above[lane];
  return {total, mass, minimum_of(lowest)};
}

inline void cut(float* weights, int64_t count, float bound, double* sums) {
  for (int64_t block = 0; block * kVocabularyBlock < count; ++block) {
    Vec sum{};
    for (int64_t i = block * kVocabularyBlock; i < (block + 1) * kVocabularyBlock; i += kLanes) {
      const Vec weight = load(weights + i), kept = select(weight >= splat(bound), weight, Vec{});
      store(weights + i, kept);
      sum += kept;
    }
    sums[block] = sum_of(sum);
  }
}

constexpr VocabularyLoops kVocabularyLoops{peak, weigh, collect, compress, tail, cut};

}  // namespace sharp::cpu::SHARP_ISA
