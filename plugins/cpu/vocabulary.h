// The sampler's loops over the logits of one token, compiled once per instruction set.
#pragma once

#include <cstdint>

namespace sharp::cpu {

// The number of tokens per block. Each block of weights has a sum and a maximum; the last is filled up with zeros.
constexpr int64_t kVocabularyBlock = 128;

// The highest of some values, and its first place.
struct Peak {
  float value;  // NaN if any value is NaN
  int64_t index;
};

// The number of the weights that are at least a bound, their sum, and the smallest of them.
struct Tail {
  int64_t count;
  double mass;
  float lowest;
};

// The sum and the maximum of each block of weights.
struct BlockTotals {
  double* sums;
  float* maxima;
};

struct VocabularyLoops {
  // Returns the highest value and its first place, and fills `maxima` with the highest value of each block.
  Peak (*peak)(const float* values, int64_t count, float* maxima);
  // Computes e^((logit - highest) sharpness) of every token, in whole blocks filled up with zeros, and the blocks'
  // totals.
  void (*weigh)(const float* logits, int64_t count, float highest, float sharpness, float* weights,
                const BlockTotals& totals);
  // Writes the places of the values that are at least `bound`, in order; returns their number.
  int64_t (*collect)(const float* values, int64_t count, float bound, int32_t* places);
  // Writes the weights from `low` to below `high`, in order; returns their number. `kept` has room for all weights and
  // 16 more, or is `weights` itself.
  int64_t (*compress)(const float* weights, int64_t count, float low, float high, float* kept);
  // Returns count, sum and minimum of the weights that are at least `bound` > 0. `weights` are whole blocks.
  Tail (*tail)(const float* weights, int64_t count, float bound);
  // Sets weights below `bound` to 0, and updates the blocks' sums.
  void (*cut)(float* weights, int64_t count, float bound, double* sums);
};

}  // namespace sharp::cpu
