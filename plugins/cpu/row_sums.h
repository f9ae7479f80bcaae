// Sums over the stored logits of a row.
#pragma once

#include "tile.h"
#include "vector_math.h"

namespace sharp::cpu::SHARP_ISA {

constexpr int64_t kSumKeys = 1024;  // lanes add up to so many keys in float, the rest is added in double

// Sum of terms(z) over a row, in double; `terms` returns two vectors.
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
