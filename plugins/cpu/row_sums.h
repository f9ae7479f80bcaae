// Sums over the stored logits of a row.
#pragma once

#include "tile.h"
#include "vector_math.h"

namespace sharp::cpu::SHARP_ISA {

constexpr int64_t kSumKeys = 1024;  // keys that lanes sum in float; the partial sums are added in double

// The sums of `terms` over a row of `count` logits, in double. `terms(z, first, second)` adds to two vectors. `logits`
// must be readable and filled up, for example with -inf, to whole vectors.
struct Sums {
  double first, second;
};

template <typename Terms>
Sums sum_row(const float* logits, int64_t count, Terms terms) {
  Sums total{0, 0};
  for (int64_t begin = 0; begin < count; begin += kSumKeys) {
    Vec first{}, second{};
    const int64_t end = smaller(begin + kSumKeys, count);
    for (int64_t key = begin; key < end; key += kLanes) terms(load(logits + key), first, second);
    total.first += sum_of(first);
    total.second += sum_of(second);
  }
  return total;
}

}  // namespace sharp::cpu::SHARP_ISA
