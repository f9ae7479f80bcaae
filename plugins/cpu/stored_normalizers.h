// The normalizers that must see all logits of a row before they know a weight: `solve` reads them, `weight` is then
// pointwise. A masked key has the logit -inf and gets weight 0.
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

// softmax(beta z), beta = max(poly(H), 1) if the entropy H of softmax(z) is above the threshold, else 1.
struct AdaptiveSoftmax {
  static void solve(const Problem& problem, const float* logits, int64_t count, RowState& state) {
    const float highest = state.highest;
    const Sums sums = sum_row(logits, count, [&](Vec z, Vec& sum, Vec& weighted_log) {
      const Vec shifted = z - highest, w = exp_nonpositive(shifted);
      sum += w;
      weighted_log += select(w == 0.0f, Vec{}, w * shifted);
    });
    const double entropy = __builtin_log(sums.first) - sums.second / sums.first;
    double beta = 1;
    if (entropy > problem.attributes.entropy_threshold) {
      double polynomial = 0;
      for (int64_t term = 0; term < problem.attributes.temperature_terms; ++term)
        polynomial = polynomial * entropy + problem.attributes.temperature_coefficients[term];
      beta = larger(polynomial, 1.0);
    }
    state.inverse_temperature = static_cast<float>(beta);
  }

  AdaptiveSoftmax(const Problem&, const RowState& state) : highest(state.highest), beta(state.inverse_temperature) {}
  Vec weight(Vec z) const { return exp_nonpositive((z - highest) * beta); }
  Vec log_weight(Vec z, Vec) const { return (z - highest) * beta; }
  float highest, beta;
};

enum class Power { kOne, kTwo, kAny };

// Eq. 2 of ASEntmax's paper: weight = [s - tau]_+^k, s = (alpha - 1)(z - max z), k = 1 / (alpha - 1).
template <Power kPower>
struct Entmax {
  static constexpr int kMaxSteps = 64;

  // With x = [s - tau]_+, F = sum x^k and G = sum x^(k-1): for k >= 1 the Newton step on F^(1/k) - 1 climbs to the root
  // from tau = -1 without passing it. For k < 1 F is concave between the keys; there the plain step on F - 1, and a
  // bisection wherever it leaves the bracket.
  static void solve(const Problem& problem, const float* logits, int64_t count, RowState& state) {
    const double alpha = problem.attributes.alpha, k = 1 / (alpha - 1);
    const float highest = state.highest, factor = problem.attributes.alpha - 1.0f, power = static_cast<float>(k);
    float low = -1.0f, high = static_cast<float>(-__builtin_pow(static_cast<double>(state.visible), 1 - alpha));
    float tau = low;
    for (int step = 0; step < kMaxSteps; ++step) {
      const Sums sums = sum_row(logits, count, [&](Vec z, Vec& sum, Vec& slope) {
        const Vec shifted = (z - highest) * factor - tau;
        const VecInt zero = shifted <= 0.0f;
        const Vec x = select(zero, Vec{}, shifted);
        if constexpr (kPower == Power::kOne) {
          sum += x;
          slope += select(zero, Vec{}, splat(1.0f));
        } else if constexpr (kPower == Power::kTwo) {
          sum += x * x;
          slope += x;
        } else {
          const Vec w = power_of(x, power);
          sum += w;
          slope += select(zero, Vec{}, w / x);
        }
      });
      (sums.first >= 1 ? low : high) = tau;
      const double newton = k >= 1 ? (1 - __builtin_pow(sums.first, 1 - alpha)) * sums.first / sums.second
                                   : (sums.first - 1) / (k * sums.second);
      float next = static_cast<float>(tau + newton);
      if (next == tau) break;
      // The ends of the bracket count as outside: steps from one end to the other would go on for ever.
      const bool slow = step >= kMaxSteps / 2 && step % 2 == 0;
      if (!(next > low && next < high) || slow) next = low + (high - low) / 2;
      if (next == tau) break;
      tau = next;
    }
    state.threshold = tau;
  }

  Entmax(const Problem& problem, const RowState& state)
      : highest(state.highest),
        threshold(state.threshold),
        factor(problem.attributes.alpha - 1.0f),
        power(1.0f / factor) {}

  Vec weight(Vec z) const {
    const Vec shifted = (z - highest) * factor - threshold;
    const Vec x = select(shifted <= 0.0f, Vec{}, shifted);
    if constexpr (kPower == Power::kOne) return x;
    if constexpr (kPower == Power::kTwo) return x * x;
    return power_of(x, power);
  }
  Vec log_weight(Vec, Vec weight) const { return log_positive(weight); }
  float highest, threshold, factor, power;
};

}  // namespace sharp::cpu::SHARP_ISA
