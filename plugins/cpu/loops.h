// The attention loops of every normalizer. A loop knows a normalizer only through its template parameter.
#pragma once

#include "screened.h"
#include "screened_key.h"
#include "selected.h"
#include "stored.h"
#include "stream.h"

namespace sharp::cpu::SHARP_ISA {

// Returns the loops of a normalizer whose weights each follow from one logit and running sums.
template <typename Normalizer>
constexpr Loops streamed() {
  return {stream<Normalizer>, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, screen_key, 0};
}

// Returns the loops of a normalizer that keeps all logits of a row.
template <typename Normalizer>
constexpr Loops stored() {
  return {nullptr, score_part, weigh_part<Normalizer>, nullptr, nullptr, nullptr, nullptr, screen_key, 0};
}

// Returns the loops of entmax, which keep the logits that may get a weight.
template <Power kPower>
constexpr Loops selected() {
  return {nullptr,      select_part,     stream_values, resolve_row<kPower>, bound_part,
          merge_bounds, select_doubtful, screen_key,    kScreenedBfloatRows};
}

// Entmax has own loops for alpha 1.5 and 2, which need no power function.
inline Loops loops_for(const SharpAttributes& attributes) {
  switch (attributes.normalizer) {
    case SHARP_SSA:
      return streamed<Ssa>();
    case SHARP_SIGMOID:
      return streamed<Sigmoid>();
    case SHARP_RELU:
      return streamed<Relu>();
    case SHARP_RELU2:
      return streamed<Relu2>();
    case SHARP_SOFTPICK:
      return streamed<Softpick>();
    case SHARP_ADAPTIVE_SOFTMAX:
      return stored<AdaptiveSoftmax>();
    case SHARP_ENTMAX:
      if (attributes.alpha == 1.5f) return selected<Power::kTwo>();
      if (attributes.alpha == 2.0f) return selected<Power::kOne>();
      return selected<Power::kAny>();
    default:
      return streamed<Softmax>();
  }
}

}  // namespace sharp::cpu::SHARP_ISA
