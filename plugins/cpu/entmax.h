// Entmax: the threshold tau of a row, and the weight of a logit above it.
#pragma once

#include "row_sums.h"

namespace sharp::cpu::SHARP_ISA {

enum class Power { kOne, kTwo, kAny };

// Eq. 2 of ASEntmax's paper: weight = [s - tau]_+^k, s = (alpha - 1)(z - max z), k = 1 / (alpha - 1).
template <Power kPower>
struct Entmax {
  static constexpr int kMaxSteps = 64;

  // With x = [s - tau]_+, F = sum x^k and G = sum x^(k-1): for k >= 1 the Newton step on F^(1/k) - 1 climbs to the root
  // from tau = -1 without passing it. For k < 1 F is concave between the keys; there the plain step on F - 1, and a
  // bisection wherever it leaves the bracket.
  //
  // A sink is one more key, whose logit is not among the `count`.
  static void solve(const Problem& problem, const float* logits, int64_t count, float sink, RowState& state) {
    const double alpha = problem.attributes.alpha, k = 1 / (alpha - 1);
    const bool has_sink = sink > -kInfinity;
    const float highest = state.highest > sink ? state.highest : sink;
    const float factor = problem.attributes.alpha - 1.0f, power = static_cast<float>(k);
    const auto competing = static_cast<double>(state.visible + has_sink);
    float low = -1.0f, high = static_cast<float>(-__builtin_pow(competing, 1 - alpha));
    float tau = low;
    for (int step = 0; step < kMaxSteps; ++step) {
      Sums sums = sum_row(logits, count, [&](Vec z, Vec& sum, Vec& slope) {
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
      const double of_sink = has_sink ? static_cast<double>((sink - highest) * factor) - tau : 0;
      if (of_sink > 0) {
        const double slope = __builtin_pow(of_sink, k - 1);
        sums.first += slope * of_sink;
        sums.second += slope;
      }
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

  Entmax(const Problem& problem, float sink, const RowState& state)
      : highest(state.highest > sink ? state.highest : sink),
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
