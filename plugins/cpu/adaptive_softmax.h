// Adaptive softmax (ICML 2025): its temperature is computed from the entropy of the plain softmax.
#pragma once

#include "tile.h"
#include "vector_math.h"

namespace sharp::cpu::SHARP_ISA {

// softmax(beta z), with the beta that `find_temperature` (temperature.h) has computed.
struct AdaptiveSoftmax {
  AdaptiveSoftmax(const Problem&, const RowState& state) : highest(state.highest), beta(state.inverse_temperature) {}
  Vec weight(Vec z) const { return exp_nonpositive((z - highest) * beta); }
  Vec log_weight(Vec z, Vec) const { return maximum(splat(kLowestExponent), (z - highest) * beta); }
  float highest, beta;
};

}  // namespace sharp::cpu::SHARP_ISA
