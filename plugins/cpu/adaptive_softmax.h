// Adaptive temperature (ICML 2025): a softmax whose temperature follows from the entropy of the plain softmax.
#pragma once

#include "row_sums.h"

namespace sharp::cpu::SHARP_ISA {

// softmax(beta z), beta = max(poly(H), 1) if the entropy H of softmax(z) is above the threshold, else 1.
struct AdaptiveSoftmax {
  static void solve(const Problem& problem, const float* logits, int64_t count, RowState& state) {
    const float highest = state.highest;
    const Sums sums = sum_row(logits, count, [&](Vec z, Vec& sum, Vec& weighted_log) {
      const Vec shifted = z - highest, w = exp_nonpositive(shifted);
      sum += w;
      weighted_log += w * maximum(splat(kLowestExponent), shifted);
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
  Vec log_weight(Vec z, Vec) const { return maximum(splat(kLowestExponent), (z - highest) * beta); }
  float highest, beta;
};

}  // namespace sharp::cpu::SHARP_ISA
