// What a sampler does to the logits of one token, compiled once per instruction set.
#pragma once

#include <cstdint>

namespace sharp::cpu {

// Weights have a sum and a maximum per block of this many tokens; the last block is filled up with zeros.
constexpr int64_t kVocabularyBlock = 128;

struct Peak {
  float value;  // NaN if there is one among the values
  int64_t index;
};

struct Tail {
  int64_t count;
  double mass;
  float lowest;
};

struct BlockTotals {
  double* sums;
  float* maxima;
};

struct VocabularyLoops {
  // The highest of the values and the first place that has it, and the highest of each block.
  Peak (*peak)(const float* values, int64_t count, float* maxima);
  // e^((logit - highest) sharpness) of every token, in whole blocks.
  void (*weigh)(const float* logits, int64_t count, float highest, float sharpness, float* weights,
                const BlockTotals& totals);
  // The places of the values that are at least `bound`, in order; returns how many.
  int64_t (*collect)(const float* values, int64_t count, float bound, int32_t* places);
  // The weights from `low` to below `high`, in order; returns how many. `kept` has room for all and 16 more, or is
  // `weights`.
  int64_t (*compress)(const float* weights, int64_t count, float low, float high, float* kept);
  // Count, sum and lowest of the weights that are at least `bound` > 0. `weights` are whole blocks.
  Tail (*tail)(const float* weights, int64_t count, float bound);
  // Weights below `bound` become 0.
  void (*cut)(float* weights, int64_t count, float bound, double* sums);
};

}  // namespace sharp::cpu
